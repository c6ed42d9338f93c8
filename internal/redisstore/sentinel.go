package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/pubsub"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// sentinels is the topology of a master that sentinels name. A search queries all
// sentinels, and the answer with the highest epoch wins. Each new connection asks
// the server whether it is the master. A master that was demoted, and does not know
// it yet, is left as soon as a sentinel reports the switch.
type sentinels struct {
	a        address
	d        *dialer
	asked    []*server            // the sentinels
	watches  []*pubsub.Subscriber // one for each sentinel, because some learn of a new master seconds after others
	searches searcher

	mu     sync.Mutex // guards the fields below
	master *server    // nil if it is not known
	epoch  int64      // the epoch of the answer that named it
}

// switched is the channel on which a sentinel reports a new master.
const switched = "+switch-master"

func newSentinels(a address, d *dialer) *sentinels {
	t := &sentinels{a: a, d: d}
	t.searches.run, t.searches.open = t.search, d.open

	for _, addr := range a.addrs {
		o := options(a, d, addr)
		o.Username, o.Password, o.DB, o.Protocol = a.sentinelUser, a.sentinelPassword, 0, 2
		at := newServer(o)
		watch := pubsub.New(pubsub.Config{
			Server: func(context.Context, string) (redis.UniversalClient, error) { return at.rdb, nil },
			Begin:  d.calls.Begin,
			Wrap:   func(err error) error { return err },
		})
		t.asked, t.watches = append(t.asked, at), append(t.watches, watch)
	}

	// When a subscription is made, it starts a search, and a search reads t.asked. So the
	// subscriptions begin when the list is complete. A sentinel that does not answer is
	// tried again until the Store is closed.
	for _, watch := range t.watches {
		t.searches.wg.Go(func() {
			if _, err := watch.Subscribe(d.open, switched, "", t.received); err == nil {
				t.searches.requestNew() // there may have been a switch before
			}
		})
	}
	return t
}

// received is called for each message of a sentinel. If messages may have been missed, it
// is called with again set to true.
func (t *sentinels) received(message string, again bool) {
	if name, _, _ := strings.Cut(message, " "); again || name == t.a.master {
		t.searches.requestNew()
	}
}

func (t *sentinels) close() error {
	for _, w := range t.watches {
		w.Close()
	}
	// The searches end before the master is closed, because a search may replace it.
	t.searches.close()
	for _, s := range t.asked {
		s.rdb.Close()
	}
	if at := t.known(); at != nil {
		return at.rdb.Close()
	}
	return nil
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
	known := t.master == at
	if known {
		t.master = nil
	}
	t.mu.Unlock()

	// Close without mu: with TLS it sends a last message, and may block.
	if known {
		at.rdb.Close()
	}
}

// claimed is a sentinel's answer: which server is the master.
type claimed struct {
	addr  string
	epoch int64
}

// search queries all sentinels for the master, and adopts it.
func (t *sentinels) search(ctx context.Context) error {
	timeout := time.Duration(t.d.timeout.Load())
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	answers, errs := askAll(within, t.asked, func(ctx context.Context, s *server) (claimed, error) {
		return t.ask(ctx, s, timeout)
	})
	if len(answers) == 0 {
		return worst(errs, "sentinels")
	}
	last := slices.MaxFunc(answers, func(a, b claimed) int { return cmp.Compare(a.epoch, b.epoch) })
	err := t.adopt(ctx, last, len(errs) == 0)
	if err != nil && t.known() != nil {
		// The sentinels name another master, which cannot be used yet. The known one may
		// still answer, so perhaps no message and no failed call starts another search.
		t.searches.requestNew()
	}
	return err
}

// ask queries one sentinel. It asks for the epoch first, so that the address is not
// older than the epoch. It asks for the address by a command of its own: during a
// failover, the reply with the epoch has the address of the old master.
func (t *sentinels) ask(ctx context.Context, s *server, took time.Duration) (claimed, error) {
	var replies [2][]any
	for i, what := range []string{"master", "get-master-addr-by-name"} {
		v, err := t.d.ask(ctx, s.rdb, "sentinel", what, t.a.master)
		if err != nil && !errors.Is(err, redis.Nil) {
			return claimed{}, fmt.Errorf("sentinel %s: %w", s.addr, diagnose(err, sentinelHints(t.a), took))
		}
		replies[i], _ = v.([]any)
	}

	epoch := int64(-1)
	for i := 0; i+1 < len(replies[0]); i += 2 {
		if text, ok := replies[0][i+1].(string); ok && replies[0][i] == "config-epoch" {
			epoch, _ = strconv.ParseInt(text, 10, 64)
		}
	}
	if at := replies[1]; epoch >= 0 && len(at) == 2 {
		host, ok1 := at[0].(string)
		port, ok2 := at[1].(string)
		if ok1 && ok2 {
			return claimed{net.JoinHostPort(host, port), epoch}, nil
		}
	}
	return claimed{}, fmt.Errorf("sentinel %s: %w", s.addr, resp.Unexpected(replies, t.a.secrets()...))
}

// adopt makes the server of an answer the master, if the server reports that it is
// the master. While a master is known, adopt ignores an answer with a lower epoch than the
// known one, because its sentinel has missed a failover. But if all sentinels have
// answered, even such an answer counts.
func (t *sentinels) adopt(ctx context.Context, w claimed, all bool) error {
	t.mu.Lock()
	known := t.master != nil && t.master.addr == w.addr
	if known && (all || w.epoch > t.epoch) {
		t.epoch = w.epoch // the master may have been another one meanwhile
	}
	keep := known || t.master != nil && w.epoch < t.epoch && !all
	t.mu.Unlock()
	if keep {
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

	// Searches run one at a time, so no other search has set a master since mu was
	// unlocked. Only forget may have cleared it.
	t.mu.Lock()
	was := t.master
	t.master, t.epoch = to, w.epoch
	t.mu.Unlock()
	if was != nil {
		was.rdb.Close() // also ends the subscriptions, which then move to the new master
	}
	return nil
}

// isMaster refuses a connection to a server that is not the master.
func isMaster(ctx context.Context, conn *redis.Conn) error {
	v, err := resp.Do(ctx, conn, []any{"role"})
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
