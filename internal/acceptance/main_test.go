package acceptance

import (
	"flag"
	"os"
	"testing"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) {
	// A suite mostly sleeps, so run several at the same time. A -parallel on the command line is
	// parsed later, and takes precedence.
	_ = flag.Set("test.parallel", "16")
	os.Exit(redistest.Main(m))
}

var eventually = await.Success
