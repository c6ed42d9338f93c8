package crew

import "syscall"

// DieWithParent makes the kernel kill a process when the thread that forks it ends, for any
// reason.
func DieWithParent(sys *syscall.SysProcAttr) { sys.Pdeathsig = syscall.SIGKILL }
