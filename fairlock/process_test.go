//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package fairlock_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
)

// These tests kill and stop processes. A child is this binary, run again. It ends
// when its standard input is closed.

const roleEnv = "HASP_FAIRLOCK_TEST_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleEnv)
	if role == "" {
		os.Exit(redistest.Main(m))
	}
	os.Unsetenv(roleEnv)
	f := strings.Split(role, "\x1f")
	n, _ := strconv.Atoi(f[2])
	if err := play(f[0], f[1], n); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// play makes n Clients lock "k", each with a place of its own, and prints the
// outcomes. A holder keeps and renews its lease; the others unlock.
func play(role, url string, n int) error {
	for i := range n {
		c, err := hasp.Open(context.Background(), url, &hasp.Options{Owner: fmt.Sprint(role, " ", i)})
		if err != nil {
			return err
		}
		go func() {
			lease, err := c.Lock(context.Background(), "k")
			if err != nil {
				fmt.Println(i, "error", err)
				return
			}
			fmt.Println(i, "got it")
			if role != "holder" {
				if err := lease.Unlock(context.Background()); err != nil {
					fmt.Println(i, "error", err)
				}
			}
		}()
	}
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// child is a process that runs play.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err strings.Builder
}

func start(t *testing.T, role, url string, n int) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(exe)}
	c.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", roleEnv+"="+strings.Join([]string{role, url, strconv.Itoa(n)}, "\x1f"))
	c.cmd.Stderr = &c.err
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	return c
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

func (c *child) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// stop stops the child, and returns when all its threads have stopped: until
// then it may still receive the key.
func (c *child) stop(t *testing.T) {
	t.Helper()
	c.signal(t, syscall.SIGSTOP)
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(c.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		if err == nil && status.Stopped() {
			return
		}
		if err != syscall.EINTR {
			t.Fatalf("wait for the stop: %v, %v", err, status)
		}
	}
}

// line returns the next line that the child prints.
func (c *child) line(t *testing.T) string {
	t.Helper()
	printed := make(chan string, 1)
	go func() {
		if c.out.Scan() {
			printed <- c.out.Text()
		} else {
			printed <- "nothing more"
		}
	}()
	select {
	case s := <-printed:
		return s
	case <-time.After(30 * time.Second):
		t.Fatal("the child prints nothing")
		return ""
	}
}

// url returns the URL of a Client of r's server, with that window.
func (r rig) url(window time.Duration) string {
	return fmt.Sprintf("fairlock+%s?window=%v&timeout=20s", r.srv.URL(), window)
}

// unsubscribed returns when the server has noticed that n of the clients that wait
// for "k" have no subscription any more.
func (r rig) unsubscribed(t *testing.T, n int) {
	t.Helper()
	atLast(t, fmt.Sprintf("%d channels without a subscriber", n), func() bool {
		gone := 0
		for _, channel := range r.rdb.ZRange(t.Context(), aliveKey, 0, -1).Val() {
			if r.rdb.PubSubNumSub(t.Context(), channel).Val()[channel] == 0 {
				gone++
			}
		}
		return gone >= n
	})
}

// held takes a hold of "k" that outlasts the test.
func (r rig) held(t *testing.T) backend.Claim {
	c := claim("k")
	c.TTL = time.Hour
	r.acquire(t, c)
	return c
}

// Ten waiters whose processes were killed are before a living one. The window is
// long, so the dead still have their places.
func TestLivingWaiterBehindTenThatWereKilled(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	c := r.held(t)
	var cs []*child
	for i := range 2 {
		cs = append(cs, start(t, "dead", r.url(time.Minute), 5))
		r.queued(t, "k", 5*(i+1))
	}
	x := r.wait(t, r.another(t), claim("k"), 11)
	for _, c := range cs {
		c.kill()
	}
	r.unsubscribed(t, 10)
	began := time.Now()
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	x.got(t)
	t.Logf("the waiter behind the ten got the key %v after the release", time.Since(began))
	if n := r.rdb.LLen(t.Context(), queueKey).Val(); n != 10 {
		t.Errorf("%d are in the queue, want the ten", n)
	}
	x.release(t)
}

// A client that subscribes to all channels by pattern does not count as a waiter.
func TestSubscriberByPatternIsNoReceiver(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	watch := r.rdb.PSubscribe(t.Context(), "*")
	defer watch.Close()
	if _, err := watch.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := r.held(t)
	head := start(t, "dead", r.url(time.Minute), 1)
	r.queued(t, "k", 1)
	x := r.wait(t, r.another(t), claim("k"), 2)
	head.kill()
	r.unsubscribed(t, 1)
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	x.got(t)
	x.release(t)
}

// Of several stopped waiters only the first is handed the key. When its term has
// ended, the windows of the others have passed.
func TestOnlyTheFirstStoppedWaiterIsHandedTheKey(t *testing.T) {
	t.Parallel()
	const window = time.Second
	r := setup(t, nil)
	c := r.held(t)
	var stopped []*child
	for i := range 3 {
		stopped = append(stopped, start(t, fmt.Sprint("stopped", i), r.url(window), 1))
		r.queued(t, "k", i+1)
	}
	d := fairlock.New(r.srv.Client(), &fairlock.Options{Window: window})
	t.Cleanup(func() { d.Close() })
	x := r.wait(t, d, claim("k"), 4)
	for _, s := range stopped {
		s.stop(t)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	var owners []string
	atLast(t, "the living one holds the key", func() bool {
		s, err := r.d.Inspect(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if s.Held && !slices.Contains(owners, s.Owner) {
			owners = append(owners, s.Owner)
		}
		return s.Owner == x.c.Owner
	})
	x.got(t)
	if len(owners) > 2 {
		t.Errorf("the key was handed to %q", owners)
	}
	// When the stopped processes continue, they queue again and are served.
	for _, s := range stopped {
		s.signal(t, syscall.SIGCONT)
	}
	r.queued(t, "k", 3)
	x.release(t)
	for i, s := range stopped {
		if got := s.line(t); got != "0 got it" {
			t.Errorf("stopped %d: %s, %s", i, got, s.err.String())
		}
	}
}

func TestFirstWaiterFollowsAHolderThatIsKilled(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	holder := start(t, "holder", r.url(time.Second)+"&ttl=6s", 1)
	if got := holder.line(t); got != "0 got it" {
		t.Fatal(got)
	}
	d := r.another(t)
	x, y := r.wait(t, d, claim("k"), 1), r.wait(t, d, claim("k"), 2)
	holder.kill()
	x.got(t)
	x.release(t)
	y.got(t)
	y.release(t)
}

// All waiters are killed. What they leave in the Redis expires.
func TestNothingRemainsOfWaitersThatWereKilled(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	c := r.held(t)
	a, b := start(t, "dead", r.url(500*time.Millisecond), 3), start(t, "dead", r.url(time.Second), 2)
	r.queued(t, "k", 5)
	a.kill()
	b.kill()
	atLast(t, "nothing but the hold", func() bool {
		return slices.Equal(r.rdb.Keys(t.Context(), "*").Val(), []string{"k"})
	})
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Error(err)
	}
}

// A user without the right to the channels receives no messages. It polls, and is
// served in order.
func TestUserWithoutTheChannel(t *testing.T) {
	for name, c := range map[string]struct {
		window time.Duration
		rights []any
	}{
		"no channels": {time.Minute, []any{"resetchannels"}},
		"no publish":  {6 * time.Second, []any{"allchannels", "-publish"}}, // polls find the grants
		"no pubsub":   {time.Minute, []any{"resetchannels", "-@pubsub"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := setup(t, &redistest.Options{Own: true, Real: true})
			args := append([]any{"acl", "setuser", "app", "on", ">secret", "~*", "+@all"}, c.rights...)
			if err := r.rdb.Do(t.Context(), args...).Err(); err != nil {
				t.Fatal(err)
			}
			url := strings.Replace(r.url(c.window), "redis://", "redis://app:secret@", 1)
			o := r.srv.ClientOptions()
			o.Username, o.Password = "app", "secret"
			r.d = r.driver(t, o)
			held := r.held(t)
			var cs []*child
			for i := range 3 {
				cs = append(cs, start(t, fmt.Sprint("waiter", i), url, 1))
				r.queued(t, "k", i+1)
			}
			if err := r.d.Release(t.Context(), held); err != nil {
				t.Fatal(err)
			}
			var owners []string
			atLast(t, "all were served", func() bool {
				s, err := r.d.Inspect(t.Context(), "k")
				if err != nil {
					t.Fatal(err)
				}
				if s.Held && !slices.Contains(owners, s.Owner) {
					owners = append(owners, s.Owner)
				}
				return !s.Held && len(s.Waiters) == 0
			})
			if !slices.IsSorted(owners) {
				t.Errorf("served in order %q", owners)
			}
			for i, c := range cs {
				if got := c.line(t); got != "0 got it" {
					t.Errorf("waiter %d: %s, %s", i, got, c.err.String())
				}
			}
		})
	}
}
