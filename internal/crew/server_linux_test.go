package crew

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// The kernel kills a process when the thread that forked it ends. So StartServer must not fork on
// the thread of its caller, which may end at any time.
func TestProcessOutlivesTheThreadOfItsCaller(t *testing.T) {
	c := exec.Command("sleep", "60")
	var ended <-chan struct{}
	var err error
	thread := onOwnThread(func() { ended, err = StartServer(c) })
	if err != nil {
		t.Fatal(err)
	}

	for name := fmt.Sprint("/proc/self/task/", thread); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(name); err != nil {
			break
		}
	}

	// If the kernel has sent no signal, the process ends by this one.
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}

	<-ended
	if s := c.ProcessState.Sys().(syscall.WaitStatus); s.Signal() != syscall.SIGTERM {
		t.Errorf("the process has ended: %v", c.ProcessState)
	}
}

// onOwnThread runs f on a thread that ends after f. It does not use the first thread of the
// program, which never ends.
func onOwnThread(f func()) (thread int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // without UnlockOSThread, so the thread ends with this goroutine
		thread = syscall.Gettid()
		if thread == os.Getpid() {
			thread = onOwnThread(f)
			return
		}

		f()
	}()

	<-done
	return thread
}
