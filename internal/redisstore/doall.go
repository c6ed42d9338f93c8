package redisstore

import (
	"context"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Reply is the reply to one command of DoAll, as Do returns it.
type Reply struct {
	Value any
	Err   error
}

// DoAll sends commands, each once, over one connection. The Store must be one
// server. The server executes them in their order; commands of other clients can
// come between them.
func (s *Store) DoAll(ctx context.Context, commands ...[]any) []Reply {
	replies := make([]Reply, len(commands))
	within, end := s.begin(ctx)
	defer end()

	at, err := s.servers.find(within, "")
	if err != nil {
		err = s.fail(err)
		for i := range replies {
			replies[i].Err = err
		}
		return replies
	}

	cmds := make([]*resp.Command, len(commands))
	for i, args := range commands {
		cmds[i] = resp.NewCommand(within, args)
	}
	// Each command has its own error. send returns one only for replicas.
	_ = s.send(within, at, false, false, cmds...)

	for i, cmd := range cmds {
		if cancelled(ctx, cmd.Err()) {
			// The caller has left. The server may have executed the command.
			replies[i].Err = s.failAt(at, ctx.Err())
			continue
		}
		replies[i].Value, replies[i].Err = s.result(at, cmd, nil)
	}
	return replies
}
