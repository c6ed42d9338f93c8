package acceptance

import (
	"flag"
	"os"
	"testing"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) {
	// Most of a suite is waiting. A -parallel on the command line is parsed later, and wins.
	_ = flag.Set("test.parallel", "8")
	os.Exit(redistest.Main(m))
}

var must, eventually = await.Must, await.Success
