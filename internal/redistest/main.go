package redistest

import (
	"flag"
	"fmt"
	"runtime"
	"testing"
)

// atATime is the least number of parallel tests at a time.
const atATime = 8

// Main runs the tests of m and returns the exit code. Parallel tests against a
// Redis mostly wait, so more of them run at a time than there are processors. A
// flag on the command line takes precedence.
func Main(m *testing.M) int {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" || f.Name == "test.fuzz" })
	if !given && runtime.GOMAXPROCS(0) < atATime {
		if err := flag.Set("test.parallel", fmt.Sprint(atATime)); err != nil {
			panic(err)
		}
	}
	return m.Run()
}
