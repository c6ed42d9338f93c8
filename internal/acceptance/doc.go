// Package acceptance runs the conformance suite for every strategy of hasp, opened
// by configuration, as users open it. Each strategy on Redis gets a server in a
// container.
//
//	HASP_TEST_REDIS=container go test ./internal/acceptance
//
// Without that variable these tests are skipped. With it, they fail if there is no
// Docker. The tests on Sentinel and on a cluster, over failovers and with the least
// rights, use redis-server processes. No package imports this one, so users of hasp
// do not get its dependencies.
package acceptance
