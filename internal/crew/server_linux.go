package crew

import "syscall"

// DieWithParent lets the kernel kill a process when the thread that forked it ends, for whatever
// reason.
func DieWithParent(sys *syscall.SysProcAttr) { sys.Pdeathsig = syscall.SIGKILL }
