package job

import "syscall"

// dieWithParent has the kernel kill the child when the thread that forks it
// ends, by whatever means.
func dieWithParent(sys *syscall.SysProcAttr) {
	sys.Pdeathsig = syscall.SIGKILL
}
