// Package acceptance runs the conformance suite for every strategy of the main module. It opens
// each strategy by a configuration, as users do. Strategies on Redis run on real servers. With
//
//	HASP_TEST_REDIS=container go test ./internal/acceptance
//
// each server is a container, and the tests fail if there is no Docker. Otherwise the servers are
// processes. The tests of Sentinel, of clusters, of failovers and of rights always use processes.
// No package imports this package, so users of hasp do not depend on what it imports.
package acceptance
