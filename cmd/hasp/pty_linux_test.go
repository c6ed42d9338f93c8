package main

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// person is the master side of a pseudo-terminal, where a person types and reads.
type person struct {
	*stream
	master *os.File
}

// openPTY opens a pseudo-terminal of 100 columns and 40 lines, and returns its
// master side and its slave side. The caller closes the slave after it has started
// a program on it.
func openPTY(t *testing.T) (*person, *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var n int
	cerr := conn.Control(func(fd uintptr) {
		if err = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); err != nil {
			return
		}
		if n, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN); err != nil {
			return
		}
		err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 100})
	})
	if cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	return &person{listen(t, master), master}, slave
}

// types writes text as if a person typed it.
func (p *person) types(text string) {
	p.t.Helper()
	if _, err := p.master.Write([]byte(text)); err != nil {
		p.t.Fatal(err)
	}
}
