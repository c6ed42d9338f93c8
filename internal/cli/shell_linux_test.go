package cli

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func init() {
	roles["shell"] = shell
	roles["steady"] = steady
}

// steady is a command that exits with 4 on SIGINT. It is not a shell script, because a shell starts
// processes. If a stop signal reaches a shell between vfork and exec, the child stops, and the
// shell waits for the child without being stopped itself.
func steady([]string) int {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, unix.SIGINT)
	fmt.Println("ready")
	<-ch
	fmt.Println("caught")
	return 4
}

// runSteady returns the arguments with which hasp runs steady under a lock.
func runSteady(t *testing.T) []string {
	t.Helper()
	return []string{"run", "key", "--ttl", "10m", "--", "env", role + "=steady", executable(t)}
}

// shell is a shell with job control for one job. It runs args in a new process group. If args end
// with "&", the group is in the background, otherwise in the foreground. On descriptor 3 it reports
// each change of the job, and which group has the terminal. It reads the orders "fg" and "bg" from
// descriptor 4.
func shell(args []string) int {
	unix.CloseOnExec(3)
	unix.CloseOnExec(4)
	report, orders := os.NewFile(3, "report"), bufio.NewReader(os.NewFile(4, "orders"))
	// Catch these signals instead of ignoring them, because the job would inherit ignored signals.
	signal.Notify(make(chan os.Signal, 1), unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP)
	background := args[len(args)-1] == "&"
	if background {
		args = args[:len(args)-1]
	}
	os.Setenv(role, "hasp")
	job, err := syscall.ForkExec(args[0], args, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2},
		Sys: &syscall.SysProcAttr{Setpgid: true, Foreground: !background, Ctty: 0, Pdeathsig: unix.SIGKILL}})
	if err != nil {
		fmt.Fprintln(report, err)
		return 1
	}
	signal.Ignore(unix.SIGTTOU)
	for {
		var ws syscall.WaitStatus
		if _, err := syscall.Wait4(job, &ws, syscall.WUNTRACED, nil); err == syscall.EINTR {
			continue
		}
		terminal := takeTerminal(job)
		switch {
		case ws.Exited():
			fmt.Fprintf(report, "exited %d: %s\n", ws.ExitStatus(), terminal)
		case ws.Signaled():
			fmt.Fprintf(report, "killed by %d: %s\n", ws.Signal(), terminal)
		}
		if !ws.Stopped() {
			// When the shell ends, the kernel hangs up the terminal. Output that the test has not
			// read may then be lost. So wait for the test.
			fmt.Fprintln(os.Stderr, farewell)
			_, _ = orders.WriteTo(io.Discard)
			return 0
		}
		fmt.Fprintf(report, "stopped: %s\n", terminal)
		order, err := orders.ReadString('\n')
		if err != nil {
			return 1
		}
		if order == "fg\n" {
			_ = unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, job)
		}
		_ = unix.Kill(-job, unix.SIGCONT)
		fmt.Fprint(report, "continued\n")
	}
}

// takeTerminal puts the shell into the foreground, and returns which group was there before.
func takeTerminal(job int) string {
	had := "another group has the terminal"
	switch pgrp, _ := unix.IoctlGetInt(0, unix.TIOCGPGRP); pgrp {
	case job:
		had = "the job has the terminal"
	case unix.Getpgrp():
		had = "the shell has the terminal"
	}
	if err := unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, unix.Getpgrp()); err != nil {
		had += ", and " + err.Error()
	}
	return had
}

// farewell is the last line that the shell prints.
const farewell = "the shell has no jobs left"

// session is a person at a terminal, where a shell runs one job.
type session struct {
	*person
	url    string
	piped  *stream // the job's standard output, if that is a pipe
	report *stream // the reports of the shell
	orders *os.File
}

// startSession runs hasp with args in a shell. If args end with "&", hasp runs in the background.
// If piped is set, the job's standard output is a pipe.
func startSession(t *testing.T, url string, piped bool, args ...string) *session {
	t.Helper()
	s := startJobIn(t, self(t, "shell", url, append([]string{executable(t)}, args...)...), piped)
	s.url = url
	return s
}

func startJobIn(t *testing.T, cmd *exec.Cmd, piped bool) *session {
	t.Helper()
	s := &session{}
	report, reportW := pipe(t)
	defer reportW.Close()
	ordersR, ordersW, err := os.Pipe()
	must(t, err)
	defer ordersR.Close()
	t.Cleanup(func() { ordersW.Close() })
	s.report, s.orders = report, ordersW

	if piped {
		s.piped = &stream{t: t}
		cmd.Stdout = s.piped
	}
	cmd.ExtraFiles = []*os.File{reportW, ordersR}
	s.person = startOnPTY(t, cmd)
	return s
}

func (s *session) order(text string) {
	s.t.Helper()
	_, err := s.orders.Write([]byte(text + "\n"))
	must(s.t, err)
}
