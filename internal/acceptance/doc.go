// Package acceptance runs the conformance suite for every strategy that comes
// with hasp, opened as its users open it: by configuration. Strategies on
// Redis get a server in a container of its own.
//
//	HASP_TEST_REDIS=container go test ./internal/acceptance
//
// Without that variable these tests are skipped; with it, a machine without
// Docker fails. The same on Sentinel and on a cluster, over failovers and under
// the least rights, takes redis-server processes. Nobody imports this package, so no user of hasp resolves what it
// needs.
package acceptance
