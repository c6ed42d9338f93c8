//go:build unix && !linux

package etcdtest

import "syscall"

func endsWithParent() *syscall.SysProcAttr { return nil }
