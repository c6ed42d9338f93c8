// Package childtest runs parts of tests in processes of their own. Such a child is
// the binary of the test, run again in a role.
package childtest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// env is the environment variable that names the role of a child and its arguments.
const env = "HASP_TEST_CHILD"

// separator is between the role and the arguments.
const separator = "\x1f"

// Roles are what children do, by name. If one returns an error, its process prints
// it and exits with 1.
type Roles map[string]func(args []string) error

// Main does the work of this process and exits, if it is a child. TestMain calls it
// first.
func Main(roles Roles) {
	role, ok := os.LookupEnv(env)
	if !ok {
		return
	}
	os.Unsetenv(env)
	words := strings.Split(role, separator)
	if err := roles[words[0]](words[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// AwaitEnd blocks a child until its parent calls End, or has ended.
func AwaitEnd() { io.Copy(io.Discard, os.Stdin) }

// Child is a process in a role.
type Child struct {
	*os.Process
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err strings.Builder
}

// Start starts a child. The end of the test kills it.
func Start(t *testing.T, role string, args ...string) *Child {
	t.Helper()
	c, err := start(strings.Join(append([]string{role}, args...), separator))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Kill)
	return c
}

func start(role string) (*Child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &Child{cmd: exec.Command(exe)}
	// Otherwise the race detector sleeps for a second before a child exits.
	c.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", env+"="+role)
	c.cmd.Stderr = &c.err
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewScanner(out)
	err = c.cmd.Start()
	c.Process = c.cmd.Process
	return c, err
}

// Line returns the next line that the child prints.
func (c *Child) Line(t *testing.T) string {
	t.Helper()
	printed := make(chan bool, 1)
	go func() { printed <- c.out.Scan() }()
	select {
	case ok := <-printed:
		if !ok {
			t.Fatalf("the child has ended: %v, %s", c.cmd.Wait(), c.err.String())
		}
	case <-time.After(time.Minute):
		t.Fatal("the child prints nothing")
	}
	return c.out.Text()
}

// Rest returns what a child prints until it ends. It fails the test if the child
// prints an error.
func (c *Child) Rest(t *testing.T) (lines []string) {
	t.Helper()
	for c.out.Scan() {
		lines = append(lines, c.out.Text())
	}
	c.cmd.Wait()
	if c.err.Len() > 0 {
		t.Fatalf("the child had an error: %s", c.err.String())
	}
	return lines
}

// End lets a child end that waits for it, and fails the test if the child has an
// error.
func (c *Child) End(t *testing.T) {
	t.Helper()
	c.in.Close()
	c.Rest(t)
	if !c.cmd.ProcessState.Success() {
		t.Errorf("the child ended with %v", c.cmd.ProcessState)
	}
}

// Kill kills the child, and waits for its end.
func (c *Child) Kill() {
	c.Process.Kill()
	c.cmd.Wait()
}
