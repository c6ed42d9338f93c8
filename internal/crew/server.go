package crew

import (
	"os/exec"
	"runtime"
	"syscall"
)

// StartServer starts another program. On Linux the kernel kills its process when this program ends,
// even by SIGKILL. StartServer waits for the process in the background, so the caller must not call
// c.Wait. It closes the channel ended when the process has ended and its output is complete.
func StartServer(c *exec.Cmd) (ended <-chan struct{}, err error) {
	started := make(chan error, 1)
	done := make(chan struct{})

	go func() {
		// The kernel kills the process when the thread that forked it ends. So this goroutine
		// keeps the thread to itself until the process has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if c.SysProcAttr == nil {
			c.SysProcAttr = &syscall.SysProcAttr{}
		}

		DieWithParent(c.SysProcAttr)
		err := c.Start()
		started <- err
		if err == nil {
			c.Wait()
		}

		close(done)
	}()

	return done, <-started
}
