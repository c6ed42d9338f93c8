//go:build unix

package childtest

import (
	"syscall"
	"testing"
)

// Stop stops the child, and returns when all its threads have stopped.
func (c *Child) Stop(t *testing.T) {
	t.Helper()
	c.signal(t, syscall.SIGSTOP)
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(c.Pid, &status, syscall.WUNTRACED, nil)
		if err == nil && status.Stopped() {
			return
		}
		if err != syscall.EINTR {
			t.Fatalf("wait for the stop: %v, %v", err, status)
		}
	}
}

// Continue ends a Stop.
func (c *Child) Continue(t *testing.T) {
	t.Helper()
	c.signal(t, syscall.SIGCONT)
}

func (c *Child) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := c.Signal(s); err != nil {
		t.Fatal(err)
	}
}
