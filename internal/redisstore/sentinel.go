package redisstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// sentinels is the topology of a master that sentinels name. All of them are
// asked, and the latest word counts. A server is believed to be the master if
// it says so itself, on every connection: one that was demoted, and does not
// know it yet, is left as soon as a sentinel tells of the switch.
type sentinels struct {
	a     address
	d     *dialer
	asked []*server
	look  looker
	rdb   *redis.Client // whoever the master is; for subscriptions

	mu     sync.Mutex // guards the rest
	master *server    // nil if it is not known
	epoch  int64      // of the sentinels' word on it
	conns  map[*subConn]bool
}

const (
	grace      = time.Second     // for those that hesitate when others have answered
	retryAfter = time.Second     // a sentinel that was silent is heard again
	silentFor  = 3 * time.Second // a sentinel that we hear is asked whether it is there
)

func newSentinels(a address, d *dialer) *sentinels {
	t := &sentinels{a: a, d: d, conns: map[*subConn]bool{}}
	t.look.search, t.look.open = t.search, d.open
	for _, addr := range a.addrs {
		o := options(a, d, addr)
		o.Username, o.Password, o.DB, o.Protocol = a.sentinelUser, a.sentinelPassword, 0, 2
		t.asked = append(t.asked, newServer(o))
	}
	o := options(a, d, a.master)
	o.OnConnect, o.Dialer = isMaster, t.dial
	t.rdb = redis.NewClient(o)
	for _, at := range t.asked {
		t.look.wg.Go(func() { t.watch(at) })
	}
	return t
}

func (t *sentinels) close() {
	t.look.close()
	for _, s := range t.asked {
		s.rdb.Close()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.master != nil {
		t.master.rdb.Close()
	}
}

func (t *sentinels) find(ctx context.Context, _ string) (*server, error) {
	if at := t.known(); at != nil {
		return at, nil
	}
	if err := t.look.wait(ctx); err != nil {
		return nil, err
	}
	if at := t.known(); at != nil {
		return at, nil
	}
	return nil, errors.New("the master is being replaced")
}

func (t *sentinels) known() *server {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.master
}

// follow: a client that was closed, since its server is not the master, has
// sent nothing.
func (t *sentinels) follow(at *server, _ string, err error) (*server, bool) {
	if to := t.known(); errors.Is(err, redis.ErrClosed) && to != at {
		return to, false
	}
	return nil, false
}

func (t *sentinels) failed(at *server, err error) {
	if !moved(err) {
		return
	}
	if errors.As(err, new(redis.Error)) || errors.As(err, new(notMaster)) {
		t.forget(at)
	}
	t.look.trouble()
}

// forget leaves a server that says that it is not the master.
func (t *sentinels) forget(at *server) {
	t.mu.Lock()
	close := func() {}
	if t.master == at {
		close = t.replace(nil)
	}
	t.mu.Unlock()
	close()
}

// replace returns what closes all connections to the master that was. mu is
// held.
func (t *sentinels) replace(to *server) (close func()) {
	was, conns := t.master, slices.Collect(maps.Keys(t.conns))
	t.master = to
	return func() {
		if was != nil {
			was.rdb.Close()
		}
		for _, c := range conns {
			c.Conn.Close() // its reader finds out, and closes it properly
		}
	}
}

// word is what a sentinel says.
type word struct {
	addr  string
	epoch int64
	err   error
}

// search asks all sentinels who the master is, and goes to it.
func (t *sentinels) search(ctx context.Context) error {
	timeout := time.Duration(t.d.timeout.Load())
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	words := make(chan word, len(t.asked))
	for _, s := range t.asked {
		t.look.wg.Go(func() { words <- t.ask(within, s, timeout) })
	}
	var last *word
	var errs []error
	late := time.NewTimer(grace)
	defer late.Stop()
	for heard := 0; heard < len(t.asked); {
		stop := late.C
		if last == nil {
			stop = nil
		}
		select {
		case w := <-words:
			heard++
			if w.err != nil {
				errs = append(errs, w.err)
			} else if last == nil || w.epoch > last.epoch {
				last = &w
			}
		case <-stop:
			cancel() // and the others say that they were stopped
		}
	}
	if last == nil {
		return worst(errs, "sentinels")
	}
	return t.adopt(ctx, last, len(errs) == 0)
}

// ask asks one sentinel. How new its word is comes first, so that the address
// is not older. It comes by a command of its own, since in a failover that is
// not over the sentinel that does it lists the old one.
func (t *sentinels) ask(ctx context.Context, s *server, took time.Duration) word {
	var replies [2][]any
	for i, what := range []string{"master", "get-master-addr-by-name"} {
		v, err := t.d.ask(ctx, s.rdb, "sentinel", what, t.a.master)
		if err != nil && !errors.Is(err, redis.Nil) {
			return word{err: fmt.Errorf("sentinel %s: %w", s.addr, explain(err, sentinelServer(t.a), took))}
		}
		replies[i], _ = v.([]any)
	}
	w := word{epoch: -1}
	for i := 0; i+1 < len(replies[0]); i += 2 {
		if text, ok := replies[0][i+1].(string); ok && replies[0][i] == "config-epoch" {
			w.epoch, _ = strconv.ParseInt(text, 10, 64)
		}
	}
	if at := replies[1]; w.epoch >= 0 && len(at) == 2 {
		host, ok1 := at[0].(string)
		port, ok2 := at[1].(string)
		if ok1 && ok2 {
			w.addr = net.JoinHostPort(host, port)
			return w
		}
	}
	return word{err: fmt.Errorf("sentinel %s: %w", s.addr, resp.Unexpected(replies, t.a.secrets()...))}
}

// adopt goes to the server that the latest word names, if it says that it is
// the master. A word that is older than one we have heard is that of a sentinel
// that missed something, unless they all say so.
func (t *sentinels) adopt(ctx context.Context, w *word, all bool) error {
	t.mu.Lock()
	same := t.master != nil && (t.master.addr == w.addr || w.epoch < t.epoch && !all)
	t.mu.Unlock()
	if same {
		return nil
	}
	o := options(t.a, t.d, w.addr)
	o.OnConnect = isMaster
	to := newServer(o)
	began := time.Now()
	within, cancel := context.WithTimeout(ctx, time.Duration(t.d.timeout.Load()))
	defer cancel()
	if _, err := t.d.ask(within, to.rdb, "role"); err != nil {
		to.rdb.Close()
		return fmt.Errorf("master %s: %w", w.addr, explain(err, lockServer(t.a), time.Since(began)))
	}
	t.mu.Lock()
	close := t.replace(to)
	t.epoch = w.epoch
	t.mu.Unlock()
	close()
	return nil
}

// isMaster refuses a connection to a server that is not the master.
func isMaster(ctx context.Context, conn *redis.Conn) error {
	cmd := resp.NewCommand(ctx, []any{"role"})
	_ = conn.Process(ctx, cmd)
	v, err := cmd.Result()
	if err != nil {
		return err
	}
	if parts, _ := v.([]any); len(parts) == 0 || parts[0] != "master" {
		return notMaster{}
	}
	return nil
}

type notMaster struct{}

func (notMaster) Error() string {
	return "it is a replica and not the master (is a failover under way? try again)"
}

// watch hears of a new master from a sentinel for as long as the Store is open.
// All are heard: some learn of it seconds after the others.
func (t *sentinels) watch(s *server) {
	for {
		t.hear(s)
		select {
		case <-t.d.open.Done():
			return
		case <-time.After(retryAfter):
		}
	}
}

// switched is where a sentinel tells of a new master.
const switched = "+switch-master"

// noRedial is the context of what a subscription reads and writes: PubSub needs
// one to make a new connection by itself, unseen, and that fails so.
var noRedial = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// hear hears a sentinel until it is silent.
func (t *sentinels) hear(s *server) {
	ctx, cancel := context.WithTimeout(t.d.open, silentFor)
	defer cancel()
	within, end := t.d.calls.Begin(ctx)
	ps := s.rdb.Subscribe(within)
	defer ps.Close()
	err := ps.Subscribe(within, switched)
	end()
	if err != nil {
		return
	}
	defer context.AfterFunc(t.d.open, func() { ps.Close() })()
	for asked := false; ; {
		msg, err := resp.Receive(ps, noRedial, silentFor)
		switch m := msg.(type) {
		case *redis.Subscription:
			t.look.news() // perhaps there was one before
		case *redis.Message:
			if name, _, _ := strings.Cut(m.Payload, " "); name == t.a.master {
				t.look.news()
			}
		}
		switch {
		case err == nil:
			asked = false
		case asked || !timedOut(err) || ps.Ping(noRedial) != nil:
			return
		default:
			asked = true
		}
	}
}

// subConn is a connection for subscriptions. It ends when another server
// becomes the master.
type subConn struct {
	net.Conn
	t *sentinels
}

func (c *subConn) Close() error {
	c.t.mu.Lock()
	delete(c.t.conns, c)
	c.t.mu.Unlock()
	return c.Conn.Close()
}

// dial connects to the master.
func (t *sentinels) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	at, err := t.find(ctx, "")
	if err != nil {
		return deadConn{err}, nil
	}
	conn, err := t.d.dial(ctx, network, at.addr)
	if err != nil {
		return conn, err
	}
	c := &subConn{conn, t}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.master != at {
		conn.Close()
	}
	t.conns[c] = true
	return c, nil
}
