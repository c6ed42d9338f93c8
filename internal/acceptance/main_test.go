package acceptance

import (
	"flag"
	"os"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) {
	// Most of a suite is waiting. A -parallel on the command line is parsed later, and wins.
	_ = flag.Set("test.parallel", "8")
	os.Exit(redistest.Main(m))
}

// needContainers skips the test in runs without containers.
func needContainers(t *testing.T) {
	t.Helper()
	if os.Getenv(redistest.Env) != "container" {
		t.Skipf("needs containers: set %s=container", redistest.Env)
	}
}

var must, eventually = await.Must, await.Success

func lock(t *testing.T, c *hasp.Client, key string, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := c.Lock(t.Context(), key, opts...)
	must(t, err)
	return lease
}
