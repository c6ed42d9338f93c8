package testhost

import (
	"os/exec"
	"runtime"
)

// Start starts a process at a place. On Linux the kernel kills the process when this program
// ends, even by SIGKILL. Start waits for the process, so the caller must not call c.Wait. It
// closes ended when the process has ended and its output is complete.
func Start(p *Place, c *exec.Cmd) (ended <-chan struct{}, err error) {
	started, done := make(chan error, 1), make(chan struct{})
	go func() {
		// The kernel kills the process when the thread that forked it ends. So this goroutine
		// keeps the thread to itself until the process has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		endWithParent(c)
		err := p.Run(c.Start)
		started <- err
		if err == nil {
			c.Wait()
		}
		close(done)
	}()
	return done, <-started
}
