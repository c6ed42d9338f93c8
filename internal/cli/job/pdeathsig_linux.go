package job

import "syscall"

// dieWithParent makes the kernel kill the child when the thread that forked it
// ends, for any reason.
func dieWithParent(sys *syscall.SysProcAttr) {
	sys.Pdeathsig = syscall.SIGKILL
}
