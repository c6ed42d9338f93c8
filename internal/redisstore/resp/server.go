package resp

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

// Server sends commands to one server: over hasp's own connections if it is a *Pool, or by a client
// that the caller passed. Equal Servers are the same server.
type Server interface {
	// Pipeline sends commands in one pipeline, each once, over a connection that no other caller
	// uses.
	Pipeline(ctx context.Context, commands ...[]string) []Reply

	// Subscribe makes a connection for subscriptions, and sends a PING over it.
	Subscribe(ctx context.Context) (PubSub, error)
}

// PubSub is a connection for subscriptions. One goroutine may send while another receives.
type PubSub interface {
	// Send sends PING, or a command on a channel, within WriteTimeout.
	Send(command, channel string) error

	// Receive returns the next message. kind is "message", or the name of the command that the
	// server answers. The error may be one that the server replied. Receive has no timeout.
	Receive() (kind, channel, payload string, err error)

	Close()
}

// WriteTimeout is how long a write to a PubSub may take.
const WriteTimeout = time.Second

// Pipeline does what Do does, and returns the replies in a new slice.
func (p *Pool) Pipeline(ctx context.Context, commands ...[]string) []Reply {
	replies := make([]Reply, len(commands))
	p.Do(ctx, replies, commands...)
	return replies
}

// Subscribe makes a connection that does not count against the Pool's size.
func (p *Pool) Subscribe(ctx context.Context) (PubSub, error) {
	c, err := p.Connect(ctx)
	if err != nil {
		return nil, err
	}
	s := ownPubSub{c, p}
	if err := s.Send("ping", ""); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// ownPubSub is a PubSub over a connection of hasp's own.
type ownPubSub struct {
	*Conn
	pool *Pool
}

func (s ownPubSub) Close() { s.pool.Drop(s.Conn) }

func (s ownPubSub) Send(command, channel string) error {
	args := []string{command, channel}
	if channel == "" {
		args = args[:1]
	}
	_ = s.base.SetWriteDeadline(time.Now().Add(WriteTimeout))
	_, err := s.Write(appendCommand(nil, args))
	return err
}

func (s ownPubSub) Receive() (kind, channel, payload string, err error) {
	r, _ := s.in.reply()
	// An element that is missing or is no text stays empty, such as the number of channels in a
	// confirmation. The caller checks whether the message is valid.
	var texts [3]string
	parts, _ := r.Value.([]any)
	for i := range min(len(parts), len(texts)) {
		texts[i], _ = parts[i].(string)
	}
	if r.Value == "PONG" || texts[0] == "pong" { // without and with a subscription
		return "ping", "", "", nil
	}
	return texts[0], texts[1], texts[2], r.Err
}

// passed implements Server with a client that the caller passed.
type passed struct{ rdb redis.UniversalClient }

// Passed returns the Server of a client that the caller passed.
func Passed(rdb redis.UniversalClient) Server { return passed{rdb} }

// Pipeline uses a pipeline even for one command. A client has a second pool for pipelines, in which
// a renewal does not wait behind callers that want locks.
func (s passed) Pipeline(ctx context.Context, commands ...[]string) []Reply {
	pipe := s.rdb.Pipeline()
	cmds := make([]Command, len(commands))
	for i, args := range commands {
		cmds[i] = newCommand(ctx, args)
		_ = pipe.Process(ctx, &cmds[i]) // only queues the command; Exec sets its error
	}

	err := survive(func() error { _, err := pipe.Exec(ctx); return err })
	replies := make([]Reply, len(cmds))
	for i, cmd := range cmds {
		replies[i] = cmd.reply(err)
	}
	return replies
}

func (s passed) Subscribe(ctx context.Context) (PubSub, error) {
	ps := s.rdb.Subscribe(ctx)
	if err := survive(func() error { return ps.Ping(ctx) }); err != nil { // makes the connection
		ps.Close()
		return nil, err
	}
	return passedPubSub{ps}, nil
}

// passedPubSub is a PubSub of a client that the caller passed.
type passedPubSub struct{ *redis.PubSub }

func (s passedPubSub) Close() { s.PubSub.Close() }

// The variable ended is a context that has already ended. With it, PubSub does not replace a failed
// connection without a report. PubSub still obeys the deadline of a context derived from ended.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func (s passedPubSub) Send(command, channel string) error {
	ctx, cancel := context.WithTimeout(ended, WriteTimeout)
	defer cancel()
	switch command {
	case "subscribe":
		return s.Subscribe(ctx, channel)
	case "unsubscribe":
		return s.Unsubscribe(ctx, channel)
	case "ssubscribe":
		return s.SSubscribe(ctx, channel)
	case "sunsubscribe":
		return s.SUnsubscribe(ctx, channel)
	}
	return s.Ping(ctx)
}

func (s passedPubSub) Receive() (kind, channel, payload string, err error) {
	// ReceiveTimeout panics if a reply does not have the form of a message.
	var msg any
	err = survive(func() (err error) { msg, err = s.ReceiveTimeout(ended, 0); return err })
	switch m := msg.(type) {
	case *redis.Message:
		return "message", m.Channel, m.Payload, nil
	case *redis.Pong:
		return "ping", "", "", nil
	case *redis.Subscription:
		return m.Kind, m.Channel, "", nil
	}
	return "", "", "", err
}
