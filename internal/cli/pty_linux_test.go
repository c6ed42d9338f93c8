package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/await"
)

// person is the master side of a pseudo-terminal, where a person types and reads.
type person struct {
	*stream
	master *os.File
}

// startOnPTY starts a program on a new pseudo-terminal of 100 columns and 40 lines, in a new session.
func startOnPTY(t *testing.T, cmd *exec.Cmd) *person {
	t.Helper()
	fd := await.Value(unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0))
	master := os.NewFile(uintptr(fd), "/dev/ptmx")
	n, err1 := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	err2 := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	err3 := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 100})
	must(t, errors.Join(err1, err2, err3))
	slave := await.Value(os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0))
	defer slave.Close()
	p := &person{listen(t, master), master}
	cmd.Stdin, cmd.Stderr = slave, slave
	if cmd.Stdout == nil {
		cmd.Stdout = slave
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	start(t, cmd)
	return p
}

func (p *person) types(text string) { p.t.Helper(); await.Value(p.master.Write([]byte(text))) }
