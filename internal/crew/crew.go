// Package crew starts processes of the running program's own binary, and
// exchanges messages with them as JSON.
//
// A program that starts a crew asks [Role] first in main, and does the work of
// that role if there is one. It reads its messages from [Parent] until a Receive
// fails, which it does when the parent has ended.
package crew

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"sync"
)

// env is the environment variable that names the role of a process.
const env = "HASP_CREW_ROLE"

// Role returns the role that this process was started in, or "".
func Role() string { return os.Getenv(env) }

// Pipe is one end of the connection between two processes.
type Pipe struct {
	mu  sync.Mutex // guards out
	out *json.Encoder
	in  *json.Decoder
}

// Parent returns the connection to the process that started this one. It uses
// standard input and standard output; call it once.
func Parent() *Pipe { return newPipe(os.Stdin, os.Stdout) }

func newPipe(in io.Reader, out io.Writer) *Pipe {
	return &Pipe{out: json.NewEncoder(out), in: json.NewDecoder(in)}
}

// Send sends a message. Several goroutines may call it at a time.
func (p *Pipe) Send(message any) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Encode(message)
}

// Receive waits for a message and stores it in the variable that message points
// to. One goroutine at a time may call it.
func (p *Pipe) Receive(message any) error { return p.in.Decode(message) }

// Process is a started process.
type Process struct {
	*Pipe
	*os.Process
	cmd *exec.Cmd
}

// Start starts a process in a role, which must not be empty. It runs program,
// or the binary of this process if program is empty. Its standard error is that
// of this process.
func Start(program, role string) (*Process, error) {
	if program == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		program = self
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), env+"="+role)
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &Process{newPipe(out, in), cmd.Process, cmd}, nil
}

// Wait waits until the process has ended, and returns how, as exec.Cmd does. Call it
// after the last Receive.
func (p *Process) Wait() error { return p.cmd.Wait() }

// End kills the process and waits until it has ended. No goroutine may be in
// Receive.
func (p *Process) End() {
	_ = p.Kill()
	_ = p.Wait()
}
