// Package acceptance runs the conformance suite for every strategy of the main module, those on
// Redis on real servers, opened by configuration, as users open it. With
//
//	HASP_TEST_REDIS=container go test ./internal/acceptance
//
// each server is a container, and the tests fail if there is no Docker. Else the servers are
// processes. The tests on Sentinel and on a cluster, over failovers and with the least rights,
// always use processes. No package imports this one, so users of hasp do not get its
// dependencies.
package acceptance
