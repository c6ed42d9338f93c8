package acceptance

import (
	"os"
	"testing"

	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }
