package pubsub

import (
	"context"
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Server sends commands to one server, over hasp's own connections or by a client that the caller
// passed. Equal Servers are the same server.
type Server interface {
	// Do sends one command over a connection that no other caller uses.
	Do(ctx context.Context, args ...string) resp.Reply

	// Pipeline sends commands in one pipeline, each once.
	Pipeline(ctx context.Context, commands ...[]string) []resp.Reply

	// connect makes a connection for subscriptions, and sends a PING over it.
	connect(ctx context.Context) (conn, error)

	// addr returns the address, or "" if it is not known.
	addr() string
}

// conn is a connection for subscriptions. One goroutine may send while another receives.
type conn interface {
	// send sends PING, or a command on a channel, within writeTimeout.
	send(command, channel string) error

	// receive returns the next message. kind is pong, message, or the command that the server
	// confirms. The error may be a reply. receive has no timeout.
	receive() (kind, channel, payload string, err error)

	close()
}

// own is a server to which hasp has connections of its own.
type own struct{ pool *resp.Pool }

// Own returns the Server of a pool.
func Own(p *resp.Pool) Server { return own{p} }

func (s own) addr() string { return s.pool.Addr }

func (s own) Do(ctx context.Context, args ...string) resp.Reply { return s.Pipeline(ctx, args)[0] }

func (s own) Pipeline(ctx context.Context, commands ...[]string) []resp.Reply {
	replies := make([]resp.Reply, len(commands))
	s.pool.Do(ctx, replies, commands...)
	return replies
}

func (s own) connect(ctx context.Context) (conn, error) {
	c, err := s.pool.Connect(ctx)
	if err != nil {
		return nil, err
	}
	k := ownConn{c, s.pool}
	if err := k.send("ping", ""); err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

type ownConn struct {
	*resp.Conn
	pool *resp.Pool
}

func (c ownConn) close() { c.pool.Drop(c.Conn) }

func (c ownConn) send(command, channel string) error {
	if channel == "" {
		return c.Send(writeTimeout, command)
	}
	return c.Send(writeTimeout, command, channel)
}

var errNoMessage = errors.New("a reply that is no message")

func (c ownConn) receive() (kind, channel, payload string, err error) {
	r := c.Receive()
	if r.Value == "PONG" { // the form of a PONG while there is no subscription
		return "pong", "", "", nil
	}
	parts, _ := r.Value.([]any)
	ok := len(parts) > 1
	if ok {
		kind, ok = parts[0].(string)
	}
	switch {
	case r.Err != nil:
		return "", "", "", r.Err
	case ok && kind == "pong":
		return kind, "", "", nil
	case ok && len(parts) == 3:
		channel, ok = parts[1].(string)
		var message, confirms bool
		payload, message = parts[2].(string)
		_, confirms = parts[2].(int64) // how many channels are subscribed to
		ok = ok && (message || confirms) && message == strings.HasSuffix(kind, "message")
	default:
		ok = false
	}
	if !ok {
		return "", "", "", errNoMessage
	}
	return kind, channel, payload, nil
}

// passed is a server whose client the caller passed.
type passed struct{ rdb redis.UniversalClient }

// Passed returns the Server of a client that the caller passed.
func Passed(rdb redis.UniversalClient) Server { return passed{rdb} }

func (s passed) addr() string {
	if client, ok := s.rdb.(*redis.Client); ok {
		return client.Options().Addr
	}
	return ""
}

func (s passed) Do(ctx context.Context, args ...string) resp.Reply {
	return resp.Do(ctx, s.rdb, args)
}

// Pipeline makes a pipeline even of one command, because a client has a second pool for pipelines,
// in which a renewal does not queue behind callers that want locks.
func (s passed) Pipeline(ctx context.Context, commands ...[]string) []resp.Reply {
	return resp.Pipeline(ctx, s.rdb, commands)
}

func (s passed) connect(ctx context.Context) (conn, error) {
	ps := s.rdb.Subscribe(ctx)
	if err := resp.Survive(func() error { return ps.Ping(ctx) }); err != nil { // makes the connection
		ps.Close()
		return nil, err
	}
	return passedConn{ps}, nil
}

type passedConn struct{ *redis.PubSub }

func (c passedConn) close() { c.Close() }

// ended is a context that has ended, so that PubSub does not replace a failed connection by itself,
// without a report. PubSub still obeys the deadline of a context made from ended.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func (c passedConn) send(command, channel string) error {
	ctx, cancel := context.WithTimeout(ended, writeTimeout)
	defer cancel()
	switch command {
	case "subscribe":
		return c.Subscribe(ctx, channel)
	case "unsubscribe":
		return c.Unsubscribe(ctx, channel)
	case "ssubscribe":
		return c.SSubscribe(ctx, channel)
	case "sunsubscribe":
		return c.SUnsubscribe(ctx, channel)
	}
	return c.Ping(ctx)
}

func (c passedConn) receive() (kind, channel, payload string, err error) {
	// ReceiveTimeout panics if a reply does not have the form of a message.
	var msg any
	err = resp.Survive(func() (err error) { msg, err = c.ReceiveTimeout(ended, 0); return err })
	switch m := msg.(type) {
	case *redis.Message:
		return "message", m.Channel, m.Payload, nil
	case *redis.Pong:
		return "pong", "", "", nil
	case *redis.Subscription:
		return m.Kind, m.Channel, "", nil
	}
	return "", "", "", err
}
