//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hasplock/hasp/backend"
)

// roles are the tasks of child processes. A child is this binary, run again. Its
// errors are its exit code and a line on standard error.
var roles = map[string]func(dir string, args []string) error{}

const roleEnv = "HASP_FILELOCK_TEST_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleEnv)
	if role == "" {
		os.Exit(m.Run())
	}
	os.Unsetenv(roleEnv)
	args := strings.Split(role, "\x1f")
	if err := roles[args[0]](args[1], args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// child is a process with a role.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err strings.Builder
}

func play(t *testing.T, role, dir string, args ...string) *child {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	c := &child{cmd: exec.Command(exe)}
	c.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", roleEnv+"="+strings.Join(append([]string{role, dir}, args...), "\x1f"))
	c.cmd.Stderr = &c.err
	c.in, err = c.cmd.StdinPipe()
	must(t, err)
	out, err := c.cmd.StdoutPipe()
	must(t, err)
	c.out = bufio.NewScanner(out)
	must(t, c.cmd.Start())
	t.Cleanup(func() { c.kill() })
	return c
}

// line returns the next line of the child's output.
func (c *child) line(t *testing.T) string {
	t.Helper()
	if !c.out.Scan() {
		t.Fatalf("child ended: %v, %s", c.cmd.Wait(), c.err.String())
	}
	return c.out.Text()
}

// end lets the child end, and checks that it had no error.
func (c *child) end(t *testing.T) {
	t.Helper()
	c.in.Close()
	for c.out.Scan() {
	}
	if err := c.cmd.Wait(); err != nil {
		t.Errorf("child: %v, %s", err, c.err.String())
	}
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// waitForEnd blocks until the parent closes this process's standard input.
func waitForEnd() { io.Copy(io.Discard, os.Stdin) }

func init() {
	roles["count"] = count
	roles["work"] = work
	roles["guard"] = holdGuard
}

// count increments the number in a file. Only the lock protects the file.
func count(dir string, args []string) error {
	file := args[0]
	n, err := strconv.Atoi(args[1])
	d := New(dir, nil)
	for i := 0; i < n && err == nil; i++ {
		c := claim("count")
		if _, err = pollFor(d, c); err != nil {
			break
		}
		var b []byte
		if b, err = os.ReadFile(file); err != nil {
			break
		}
		v, _ := strconv.Atoi(string(b))
		if err = os.WriteFile(file, []byte(strconv.Itoa(v+1)), 0o600); err != nil {
			break
		}
		err = d.Release(context.Background(), c)
	}
	return err
}

// work takes, renews and releases until it is killed. It prints each fence before it
// goes on.
func work(dir string, args []string) error {
	d := New(dir, nil)
	for {
		for _, key := range args {
			c := fenced(claim(key))
			c.TTL = backend.MinTTL
			g, err := d.Acquire(context.Background(), c)
			if errors.Is(err, backend.ErrHeld) {
				continue
			}
			if err != nil {
				return err
			}
			fmt.Println(key, g.Fence)
			for range 3 {
				if err := renew(d, c)[0]; err != nil && !errors.Is(err, backend.ErrLost) {
					return err
				}
			}
			if err := d.Release(context.Background(), c); err != nil && !errors.Is(err, backend.ErrLost) {
				return err
			}
		}
	}
}

// holdGuard holds the guard of a key.
func holdGuard(dir string, args []string) error {
	g, err := New(dir, nil).lockGuard(context.Background(), stripeOf(args[0]))
	if err != nil {
		return err
	}
	defer g.drop()
	fmt.Println("ready")
	waitForEnd()
	return nil
}

func TestOneHolderAmongProcessesWhileOthersAreKilled(t *testing.T) {
	dir := t.TempDir()
	file := dir + "/number"
	write(t, file, []byte("0"))
	const counters, rounds = 3, 100
	var counting []*child
	for range counters {
		counting = append(counting, play(t, "count", dir, file, strconv.Itoa(rounds)))
	}

	d := New(dir, nil)
	keys := []string{"count", "a", "b", neighbour("a")}
	last := map[string]uint64{}
	for round := range 20 {
		c := play(t, "work", dir, keys...)
		for range 1 + round%7 { // so it is killed at various points
			note(t, last, c.line(t))
		}
		must(t, c.cmd.Process.Signal(syscall.SIGKILL))
		for c.out.Scan() { // its output before it died
			note(t, last, c.out.Text())
		}
		c.cmd.Wait()
		if c.err.Len() > 0 {
			t.Fatal(c.err.String())
		}
		for _, key := range keys {
			if _, err := d.Inspect(t.Context(), key); err != nil {
				t.Fatalf("round %d: what was left of %q: %v", round, key, err)
			}
		}
		key := keys[1+round%3]
		cl := fenced(claim(key))
		note(t, last, fmt.Sprint(key, " ", poll(t, d, cl).Fence))
		release(t, d, cl)
	}
	for _, c := range counting {
		c.end(t)
	}
	if b, err := os.ReadFile(file); string(b) != strconv.Itoa(counters*rounds) {
		t.Errorf("counted %s of %d, %v", b, counters*rounds, err)
	}
}

// note checks that the fence of a line "key fence" is above the last one of key.
func note(t *testing.T, last map[string]uint64, line string) {
	t.Helper()
	i := strings.LastIndexByte(line, ' ')
	key := line[:i]
	fence, err := strconv.ParseUint(line[i+1:], 10, 64)
	if err != nil || fence <= last[key] {
		t.Errorf("fence of %q after %d, %v", line, last[key], err)
	}
	last[key] = fence
}
