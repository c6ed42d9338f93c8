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

// The kernel kills a process when the thread that forked it ends. The threads of callers may
// end at any time.
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

	// Without a signal from the kernel, this one is the first.
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	<-ended
	if s := c.ProcessState.Sys().(syscall.WaitStatus); s.Signal() != syscall.SIGTERM {
		t.Errorf("the process has ended: %v", c.ProcessState)
	}
}

// onOwnThread runs f on a thread that then ends. It is not the first thread of the program,
// which never ends.
func onOwnThread(f func()) (thread int) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // without UnlockOSThread: the thread ends with this goroutine
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
