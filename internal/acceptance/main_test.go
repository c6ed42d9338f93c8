package acceptance

import (
	"os"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/childtest"
	"github.com/hasplock/hasp/internal/redistest"
)

// roles are the children of tests. The files of the tests set them.
var roles = childtest.Roles{}

func TestMain(m *testing.M) {
	childtest.Main(roles)
	os.Exit(redistest.Main(m))
}

// needContainers skips the test in runs without containers.
func needContainers(t *testing.T) {
	t.Helper()
	if os.Getenv(redistest.Env) != "container" {
		t.Skipf("needs containers: set %s=container", redistest.Env)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// open opens a Client that the end of the test closes.
func open(t *testing.T, url string) *hasp.Client {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, nil)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func lock(t *testing.T, c *hasp.Client, key string, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := c.Lock(t.Context(), key, opts...)
	must(t, err)
	return lease
}

func unlock(t *testing.T, lease *hasp.Lease) {
	t.Helper()
	if err := lease.Unlock(t.Context()); err != nil {
		t.Errorf("unlock %q: %v", lease.Key(), err)
	}
}
