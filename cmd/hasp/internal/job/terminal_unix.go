//go:build unix

package job

import (
	"os"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// terminal is the controlling terminal of hasp. A nil terminal is none; every
// method may be called on it.
//
// A terminal has one foreground process group, which may read from it and
// gets what Ctrl-C and Ctrl-Z send. A shell makes hasp's group that one. The
// command has a group of its own, so hasp lends it the terminal, as a shell
// does, and takes it back.
type terminal struct {
	fd   int
	lent bool // to the command's group, which may have lent it on
}

// openTerminal returns the controlling terminal, or nil. Standard input may
// be a file while ssh asks for a password on the terminal.
func openTerminal() *terminal {
	fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return &terminal{fd: fd}
}

// foreground returns the foreground group.
func (t *terminal) foreground() int {
	pgrp, err := unix.IoctlGetInt(t.fd, unix.TIOCGPGRP)
	if err != nil {
		return -1
	}
	return pgrp
}

// ours reports whether hasp's group is the foreground group.
func (t *terminal) ours() bool {
	return t != nil && t.foreground() == unix.Getpgrp()
}

// lentTo reports whether pgrp has the terminal.
func (t *terminal) lentTo(pgrp int) bool {
	return t != nil && t.foreground() == pgrp
}

// lend makes pgrp the foreground group if hasp's is it.
func (t *terminal) lend(pgrp int) {
	if t.ours() {
		t.lent = unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, pgrp) == nil
	}
}

// takeBack makes hasp's group the foreground group if the terminal was lent,
// and reports whether it did. What the shell has taken is no loan any more,
// even if the SIGCONT by which hasp hears of that is still on its way.
func (t *terminal) takeBack() bool {
	if t == nil || !t.lent {
		return false
	}
	t.lent = false
	if shell, err := unix.Getsid(0); err == nil && shell != unix.Getpgrp() && t.foreground() == shell {
		return false
	}
	return unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, unix.Getpgrp()) == nil
}

// recheck forgets a loan that the shell has ended, while hasp was stopped by
// somebody else's SIGSTOP.
func (t *terminal) recheck(pgrp int) {
	if t != nil && t.lent {
		t.lent = t.lentTo(pgrp)
	}
}

// interactive reports whether a person types to the command and reads it.
// Otherwise, as in a pipe to a pager, the terminal is lent when the command
// asks for it.
func interactive() bool {
	return term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stdout.Fd()))
}
