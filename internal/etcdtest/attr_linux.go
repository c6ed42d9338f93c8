package etcdtest

import "syscall"

// endsWithParent ends a process with the one that started it.
func endsWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
