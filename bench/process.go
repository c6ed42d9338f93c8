package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
)

// role is the environment variable that makes this program a worker or an
// etcd.
const role = "HASP_BENCH_ROLE"

// another starts this program in a role. It ends when its input does.
func another(as string) (cmd *exec.Cmd, in io.WriteCloser, out io.ReadCloser, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, nil, err
	}
	cmd = exec.Command(self)
	cmd.Env = append(os.Environ(), role+"="+as)
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	return cmd, in, out, errors.Join(err1, err2, cmd.Start())
}
