package crew

import (
	"io"
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/await"
)

// Child is a process whose lines a test reads.
type Child struct {
	*Process
	err strings.Builder
}

// Test starts a child. The end of the test kills the child.
func Test(t *testing.T, role string, args ...string) *Child {
	t.Helper()
	c := &Child{}
	var err error
	if c.Process, err = StartProgram(&c.err, nil, role, args...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.End)
	return c
}

// Line returns the next line that the child prints.
func (c *Child) Line(t *testing.T) (line string) {
	t.Helper()
	var err error
	await.Return(t, "the child's next line", func() { line, err = c.in.ReadString('\n') })
	if err != nil {
		t.Fatalf("the child has ended: %v, %s", c.Wait(), c.err.String())
	}
	return strings.TrimSuffix(line, "\n")
}

// Finish closes the child's standard input, because the child may wait for that. Finish then waits
// until the child has ended. If the child has an error, the test fails.
func (c *Child) Finish(t *testing.T) {
	t.Helper()
	c.stdin.Close()
	io.Copy(io.Discard, c.in)
	if err := c.Wait(); err != nil || c.err.Len() > 0 {
		t.Errorf("the child ended with %v: %s", err, c.err.String())
	}
}
