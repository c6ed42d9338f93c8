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

// sentinels is the topology of a master that sentinels name. A search queries all
// sentinels, and the answer with the highest epoch wins. Each new connection asks
// the server whether it is the master. A master that was demoted, and does not know
// it yet, is left as soon as a sentinel reports the switch.
type sentinels struct {
	a        address
	d        *dialer
	asked    []*server // the sentinels
	searches searcher
	rdb      *redis.Client // of the current master; for subscriptions

	mu     sync.Mutex        // guards the fields below
	master *server           // nil if it is not known
	epoch  int64             // the epoch of the answer that named it
	conns  map[*subConn]bool // the connections of rdb
}

const (
	grace      = time.Second     // how long the others are waited for once one has answered
	retryAfter = time.Second     // when a sentinel that was silent is connected to again
	silentFor  = 3 * time.Second // when a silent sentinel gets a PING, and then is left
)

func newSentinels(a address, d *dialer) *sentinels {
	t := &sentinels{a: a, d: d, conns: map[*subConn]bool{}}
	t.searches.run, t.searches.open = t.search, d.open

	for _, addr := range a.addrs {
		o := options(a, d, addr)
		o.Username, o.Password, o.DB, o.Protocol = a.sentinelUser, a.sentinelPassword, 0, 2
		t.asked = append(t.asked, newServer(o))
	}

	o := options(a, d, a.master)
	o.OnConnect, o.Dialer = isMaster, t.dial
	t.rdb = redis.NewClient(o)

	for _, at := range t.asked {
		t.searches.wg.Go(func() { t.watch(at) })
	}
	return t
}

func (t *sentinels) close() {
	// The searches end first, because a search may replace the master.
	t.searches.close()
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
	if err := t.searches.wait(ctx); err != nil {
		return nil, err
	}
	if at := t.known(); at != nil {
		return at, nil
	}
	// Meanwhile the master has replied that it is not the master.
	return nil, errors.New("the master is being replaced")
}

func (t *sentinels) known() *server {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.master
}

// follow leads to the current master if at's client was closed because at is not
// the master. Then nothing was sent.
func (t *sentinels) follow(at *server, _ string, err error) (*server, bool) {
	if to := t.known(); errors.Is(err, redis.ErrClosed) && to != at {
		return to, false
	}
	return nil, false
}

// failed starts a search if there may be another master, and leaves a server that
// reports that it is not the master.
func (t *sentinels) failed(at *server, err error) {
	if !mayHaveMoved(err) {
		return
	}
	if errors.As(err, new(redis.Error)) || errors.As(err, new(notMaster)) {
		// Only the server itself can say that it is not the master. If it does not
		// answer, the search decides.
		t.forget(at)
	}
	t.searches.request()
}

// forget leaves a server.
func (t *sentinels) forget(at *server) {
	t.mu.Lock()
	closeOld := func() {}
	if t.master == at {
		closeOld = t.replaceLocked(nil)
	}
	t.mu.Unlock()
	closeOld()
}

// replaceLocked sets the master, and returns a function that closes all connections
// to the old one. Its caller calls it without mu, because subConn.Close locks mu.
func (t *sentinels) replaceLocked(to *server) (closeOld func()) {
	was, conns := t.master, slices.Collect(maps.Keys(t.conns))
	t.master = to
	return func() {
		if was != nil {
			was.rdb.Close()
		}
		for _, c := range conns {
			c.Conn.Close() // the reader's error then closes c
		}
	}
}

// answer is a sentinel's answer.
type answer struct {
	addr  string
	epoch int64
	err   error
}

// search queries all sentinels for the master, and adopts it.
func (t *sentinels) search(ctx context.Context) error {
	timeout := time.Duration(t.d.timeout.Load())
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	answers := make(chan answer, len(t.asked))
	for _, s := range t.asked {
		t.searches.wg.Go(func() { answers <- t.ask(within, s, timeout) })
	}

	// Once one has answered, the others have a moment.
	var last *answer
	var errs []error
	late := time.NewTimer(grace)
	defer late.Stop()
	for ended := 0; ended < len(t.asked); {
		stop := late.C
		if last == nil {
			stop = nil
		}

		select {
		case w := <-answers:
			ended++
			if w.err != nil {
				errs = append(errs, w.err)
			} else if last == nil || w.epoch > last.epoch {
				last = &w
			}
		case <-stop:
			cancel() // the others then return errors
		}
	}

	if last == nil {
		return worst(errs, "sentinels")
	}
	return t.adopt(ctx, last, len(errs) == 0)
}

// ask queries one sentinel. It asks for the epoch first, so that the address is not
// older than the epoch. It asks for the address by a command of its own: during a
// failover, the reply with the epoch has the address of the old master.
func (t *sentinels) ask(ctx context.Context, s *server, took time.Duration) answer {
	var replies [2][]any
	for i, what := range []string{"master", "get-master-addr-by-name"} {
		v, err := t.d.ask(ctx, s.rdb, "sentinel", what, t.a.master)
		if err != nil && !errors.Is(err, redis.Nil) {
			return answer{err: fmt.Errorf("sentinel %s: %w", s.addr, diagnose(err, sentinelHints(t.a), took))}
		}
		replies[i], _ = v.([]any)
	}

	w := answer{epoch: -1}
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
	return answer{err: fmt.Errorf("sentinel %s: %w", s.addr, resp.Unexpected(replies, t.a.secrets()...))}
}

// adopt makes the server of an answer the master, if the server reports that it is
// the master. An answer with a lower epoch than the known one is of a sentinel that
// has missed a failover, unless all sentinels have answered.
func (t *sentinels) adopt(ctx context.Context, w *answer, all bool) error {
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

	// The reply is not needed: isMaster checks each new connection. If it is an error,
	// the known master stays.
	if _, err := t.d.ask(within, to.rdb, "role"); err != nil {
		to.rdb.Close()
		return fmt.Errorf("master %s: %w", w.addr, diagnose(err, lockHints(t.a), time.Since(began)))
	}

	t.mu.Lock()
	// Searches run one at a time. So since mu was unlocked, only forget can have
	// changed the master.
	closeOld := t.replaceLocked(to)
	t.epoch = w.epoch
	t.mu.Unlock()
	closeOld()
	return nil
}

// isMaster refuses a connection to a server that is not the master.
func isMaster(ctx context.Context, conn *redis.Conn) error {
	cmd := resp.NewCommand(ctx, []any{"role"})
	// The command has the same error.
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

// notMaster is the error of a connection to a server that is not the master.
type notMaster struct{}

func (notMaster) Error() string {
	return "it is a replica and not the master (is a failover under way? try again)"
}

// watch receives the messages of a sentinel as long as the Store is open. The Store
// watches all sentinels, because some learn of a new master seconds after others.
func (t *sentinels) watch(s *server) {
	for {
		t.receive(s)
		select {
		case <-t.d.open.Done():
			return
		case <-time.After(retryAfter):
		}
	}
}

// switched is the channel on which a sentinel reports a new master.
const switched = "+switch-master"

// noRedial is the context of a subscription's reads and writes. If the connection
// fails, PubSub makes a new one by itself, without a report. With a context that has
// ended it cannot.
var noRedial = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// receive receives a sentinel's messages until it is silent.
func (t *sentinels) receive(s *server) {
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
			t.searches.requestNew() // there may have been a switch before
		case *redis.Message:
			if name, _, _ := strings.Cut(m.Payload, " "); name == t.a.master {
				t.searches.requestNew()
			}
		}

		switch {
		case err == nil:
			asked = false
		// The sentinel did not answer the PING either, or the connection has
		// failed.
		case asked || !timedOut(err) || ps.Ping(noRedial) != nil:
			return
		default:
			asked = true
		}
	}
}

// subConn is a connection for subscriptions. It is closed when another server
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
	if t.master != at { // while it was connected
		// replaceLocked has not found this connection, so close it here.
		conn.Close()
	}
	t.conns[c] = true
	return c, nil
}
