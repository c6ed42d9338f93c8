//go:build unix

package job

import (
	"os"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// terminal is the controlling terminal of hasp. It is nil if hasp has no terminal. All methods
// except foreground accept a nil terminal.
//
// A terminal has one foreground process group. That group may read from it, and receives the
// signals of Ctrl-C and Ctrl-Z. A shell puts hasp's group into the foreground. The command has a
// group of its own, so hasp lends the terminal to it, as a shell does, and takes the terminal back.
type terminal struct {
	fd int

	// lent says that hasp has lent the terminal to the command's group, which may have lent it to
	// another group.
	lent bool
}

// openTerminal returns the controlling terminal, or nil. It does not use standard input, which may
// be another file.
func openTerminal() *terminal {
	fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return &terminal{fd: fd}
}

// foreground returns the foreground group, or -1.
func (t *terminal) foreground() int {
	pgrp, err := unix.IoctlGetInt(t.fd, unix.TIOCGPGRP)
	if err != nil {
		return -1
	}
	return pgrp
}

// ours reports whether hasp's group is the foreground group.
func (t *terminal) ours() bool { return t != nil && t.foreground() == unix.Getpgrp() }

// lentTo reports whether pgrp, the command's group, is the foreground group.
func (t *terminal) lentTo(pgrp int) bool { return t != nil && t.foreground() == pgrp }

// lend makes pgrp the foreground group if hasp's group is the foreground group.
func (t *terminal) lend(pgrp int) {
	if t.ours() {
		t.lent = unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, pgrp) == nil
	}
}

// takeBack puts hasp's group into the foreground if the terminal is lent, and reports whether it
// did so. If the shell has taken the terminal, takeBack does nothing, even if hasp has not yet
// received the shell's SIGCONT.
func (t *terminal) takeBack() bool {
	if t == nil || !t.lent {
		return false
	}
	t.lent = false

	// The id of the session is the shell's group, unless hasp itself is in that group.
	shell, err := unix.Getsid(0)
	hasShell := err == nil && shell != unix.Getpgrp()
	if hasShell && t.foreground() == shell {
		return false
	}
	return unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, unix.Getpgrp()) == nil
}

// recheck clears the field lent if pgrp, the command's group, does not have the terminal any more,
// because the shell has taken it while hasp was stopped.
func (t *terminal) recheck(pgrp int) {
	if t != nil && t.lent {
		t.lent = t.lentTo(pgrp)
	}
}

// interactive reports whether standard input and output are a terminal. If they are not, as in a
// pipe to a pager, hasp lends the terminal only when the command needs it.
func interactive() bool {
	return term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stdout.Fd()))
}
