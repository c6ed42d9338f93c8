// Package crew starts the binary of the running program again, in a role. It exchanges messages
// with the new processes. Tests and the tools in lab use it.
//
// A program that starts such processes begins its main or TestMain with a call of [Main], or asks
// [Role].
package crew

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
)

// env names the environment variable with the role of a process and its arguments. The constant
// separator stands before each argument.
const env, separator = "HASP_CREW_ROLE", "\x1f"

// Role returns the role in which this process was started, and its arguments. Without a role it
// returns "".
func Role() (role string, args []string) {
	words := strings.Split(os.Getenv(env), separator)
	return words[0], words[1:]
}

// Roles has the function of each role. If the function returns an error, the process prints the
// error and exits with 1.
type Roles map[string]func(args []string) error

// Main calls the function of this process's role and exits, or returns if roles has no such role.
func Main(roles Roles) {
	role, args := Role()
	f := roles[role]
	if f == nil {
		return
	}

	os.Unsetenv(env)
	if err := f(args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	os.Exit(0)
}

// Pipe is one end of the connection between two processes.
type Pipe struct {
	mu  sync.Mutex // guards out
	out io.Writer
	in  *bufio.Reader
	log io.Writer
}

// mark is the beginning of each line that is a message. A program may also print other lines.
const mark = "hasp-crew: "

// Parent returns the connection to the process that started this one. Call it once, because it uses
// standard input and standard output. Receive fails when the parent has ended.
func Parent() *Pipe { return &Pipe{out: os.Stdout, in: bufio.NewReader(os.Stdin), log: os.Stderr} }

// Send sends a message as JSON. Several goroutines may call it at the same time.
func (p *Pipe) Send(message any) error {
	b, err := json.Marshal(message)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err = fmt.Fprintf(p.out, "\n%s%s\n", mark, b)
	return err
}

// Receive waits for a message and stores it in the variable that message points to. Only one
// goroutine may call it at a time.
func (p *Pipe) Receive(message any) error {
	for {
		line, err := p.in.ReadString('\n')
		if text, ok := strings.CutPrefix(line, mark); ok && err == nil {
			return json.Unmarshal([]byte(text), message)
		}
		if line != "\n" {
			io.WriteString(p.log, line)
		}
		if err != nil {
			return err
		}
	}
}

// Process is a process that Start has started.
type Process struct {
	*Pipe
	*os.Process
	cmd   *exec.Cmd
	stdin io.Closer
}

// Start starts a process of this program in a role. The process has the same standard error as this
// one.
func Start(role string, args ...string) (*Process, error) {
	return StartProgram(os.Stderr, nil, role, args...)
}

// StartProgram is like Start, but for a program that reaches Main only with certain arguments. The
// writer log receives the standard error of the process, and its output other than messages.
func StartProgram(log io.Writer, program []string, role string, args ...string) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}

	cmd := exec.Command(self, program...)
	// Without this setting, the race detector sleeps for a second before a process exits.
	cmd.Env = append(os.Environ(), "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0",
		env+"="+strings.Join(append([]string{role}, args...), separator))
	cmd.Stderr = log
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}

	return &Process{&Pipe{out: in, in: bufio.NewReader(out), log: log}, cmd.Process, cmd, in}, nil
}

// Wait calls Wait of the exec.Cmd. Call it only after the last Receive.
func (p *Process) Wait() error { return p.cmd.Wait() }

// Pause calls [Pause] for the process.
func (p *Process) Pause() error { return Pause(p.Process) }

// Resume undoes Pause.
func (p *Process) Resume() error { return Resume(p.Process) }

// End kills the process and waits until it has ended. Do not call it while a goroutine is in
// Receive.
func (p *Process) End() { _ = p.Kill(); _ = p.Wait() }
