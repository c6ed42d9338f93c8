package redisstore

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// server is one Redis process that commands are sent to, or the master that sentinels name.
type server struct {
	*settings
	node   redis.UniversalClient // the client of this process only; see gather.rdb
	addr   string                // of a server of a cluster
	master func() string         // see finder.master
	calls  *gather
	holds  *gather // for holds that replicas must confirm

	fit      atomic.Bool   // the check has accepted the server
	checking chan struct{} // has room for one caller, who checks the server
}

// label returns the name of the server for errors, such as "redis host:port".
func (at *server) label() string {
	if at.isCluster {
		return "redis " + at.addr
	}
	if addr := at.master(); addr != "" {
		return "redis " + addr
	}
	return at.name
}

// gather returns the gather for commands. The argument confirm is that of Store.Send.
func (at *server) gather(confirm bool) *gather {
	if confirm && at.replicas > 0 {
		return at.holds
	}
	return at.calls
}

// send passes a command to the gather of the server. ASKING applies only to the next command on its
// connection, so a command after it has a pipeline of its own.
func (at *server) send(ctx context.Context, asking, confirm bool, args []string) Reply {
	var replies [2]Reply // on the stack
	g := at.gather(confirm)
	if asking {
		g.doApart(ctx, true, replies[:], []string{"asking"}, args)
		return replies[1]
	}
	g.do(ctx, replies[:1], args)
	return replies[0]
}

// ask sends commands to a server, each once, in one pipeline. If here is true, they go to this
// process, whatever their keys are. If confirm is true, the replicas must confirm the commands that
// took a hold. Replies and errors are unchanged, for Store.outcome.
func (at *server) ask(ctx context.Context, here, confirm bool, commands ...[]string) []Reply {
	replies := make([]Reply, len(commands))
	g := at.gather(confirm)

	// Renewals that replicas must confirm do not wait for other commands. On a cluster, only a
	// pipeline of its own can go to this process.
	if g.confirm || here && at.isCluster {
		g.doApart(ctx, here, replies, commands...)
	} else {
		g.do(ctx, replies, commands...)
	}
	return replies
}

// errOneOfCluster is the fault of a server of a cluster behind a client that knows only this
// server.
const errOneOfCluster = resp.ReplyError("it is one server of a cluster " +
	"(use redis-cluster://host:port, or pass a *redis.ClusterClient; redlock " +
	"needs independent masters)")

// fault runs a script on the server and reads INFO. It returns the reason why the server must not
// store locks, if there is one, or err if this cannot be found out.
func (at *server) fault(ctx context.Context) (reason, err error) {
	replies := at.ask(ctx, true, true, []string{"eval", "return 1", "0"}, []string{"info"})
	for i, r := range replies {
		// The script must run. But the user may have no right to INFO, and then its reply is nil.
		mayLack := i > 0 && resp.IsReply(r.Err)
		if r.Err != nil && !mayLack {
			return nil, r.Err
		}
	}

	info := replies[1].Value
	var cluster any
	if at.isCluster || InfoField(info, "cluster_enabled") == "1" {
		cluster = at.ask(ctx, true, false, []string{"cluster", "info"})[0].Value
	}
	if reason = unfit(info, cluster, at.mayEvict); reason != nil {
		return reason, nil
	}

	// A client of one server can use a cluster of one master, which has all slots. The size is 0 if
	// no server has a slot yet, and "" without a cluster, or without the right to ask for it.
	isSingle := slices.Contains([]string{"", "0", "1"}, InfoField(cluster, "cluster_size"))
	if !at.isCluster && !isSingle {
		return errOneOfCluster, nil
	}
	return nil, nil
}

// unfitError says why a server must not store locks.
type unfitError struct{ error }

func (e unfitError) Unwrap() error { return e.error }

// IsUnfit reports whether err says that a server must not store locks.
func IsUnfit(err error) bool { return errors.As(err, new(unfitError)) }
