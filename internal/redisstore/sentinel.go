package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// sentinels is the topology of a master that sentinels name. A search queries all sentinels, and
// uses the answer with the highest epoch. A search starts after each failure, and after the
// duration searchEvery. Each new connection first checks that its server is the master.
type sentinels struct {
	a        address
	d        *dialer
	asked    []*server // the sentinels
	searches searcher
	timer    *time.Timer // starts the next search

	mu     sync.Mutex // guards the fields below
	master *server    // nil if it is not known
	epoch  int64      // the epoch of the answer that named the master
}

// searchEvery limits how long hasp uses a demoted master that does not know yet that it was
// demoted, and still accepts writes.
const searchEvery = 10 * time.Second

func newSentinels(a address, d *dialer) *sentinels {
	t := &sentinels{a: a, d: d}
	t.searches.run, t.searches.d = t.search, d
	for _, addr := range a.addrs {
		t.asked = append(t.asked, newServerOf(d.pool(a, addr, login(a.sentinelUser, a.sentinelPassword, 0))))
	}
	t.timer = time.AfterFunc(searchEvery, t.searches.request)
	return t
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
	// After the search, the server that the search found has replied that it is not the master.
	return nil, errors.New("the master is being replaced")
}

func (t *sentinels) known() *server {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.master
}

// follow returns the current master if the argument at is a server that was closed because it is no
// longer the master. In that case, the command was not sent.
func (t *sentinels) follow(at *server, _ string, err error) (*server, bool) {
	if to := t.known(); errors.Is(err, redis.ErrClosed) && to != at {
		return to, false
	}
	return nil, false
}

// The method failed starts a search if another server may be the master now. If the given server
// itself reports that it is not the master, the method also closes the pool of that server.
func (t *sentinels) failed(at *server, err error) {
	if !mayHaveMoved(err) {
		return
	}
	// Close the server only if it replied that it is not the master. If it did not answer, the
	// search decides whether to replace it.
	if errors.As(err, new(redis.Error)) || errors.Is(err, errNotMaster) {
		t.mu.Lock()
		if t.master == at {
			t.master = nil
		}
		t.mu.Unlock()
		at.pool.Close()
	}
	t.searches.request()
}

// claimed is a sentinel's answer: the address of the master, and the epoch.
type claimed struct {
	addr  string
	epoch int64
}

// search queries all sentinels for the master, and adopts the answer with the highest epoch.
func (t *sentinels) search(ctx context.Context, timeout time.Duration) error {
	defer t.timer.Reset(searchEvery)
	answers, errs := askAll(ctx, t.asked, 0, grace, func(ctx context.Context, s *server) (claimed, error) {
		return t.ask(ctx, s, timeout)
	})
	if len(answers) == 0 {
		return worst(errs, "sentinels")
	}
	last := slices.MaxFunc(answers, func(a, b claimed) int { return cmp.Compare(a.epoch, b.epoch) })
	return t.adopt(ctx, last, len(errs) == 0)
}

// ask queries one sentinel. It asks for the epoch first, so that the address is not older than the
// epoch. A separate command asks for the address, because during a failover the reply with the
// epoch still contains the old master's address.
func (t *sentinels) ask(ctx context.Context, s *server, took time.Duration) (claimed, error) {
	var replies [2][]any
	for i, what := range []string{"master", "get-master-addr-by-name"} {
		r := s.Pipeline(ctx, []string{"sentinel", what, t.a.master})[0]
		if r.Err != nil {
			return claimed{}, fmt.Errorf("sentinel %s: %w", s.addr, diagnose(r.Err, sentinelHints, took))
		}
		replies[i], _ = r.Value.([]any)
	}

	at, i := replies[1], slices.Index(replies[0], "config-epoch")
	if len(at) == 2 && i >= 0 && i+1 < len(replies[0]) {
		epoch, err := strconv.ParseInt(fmt.Sprint(replies[0][i+1]), 10, 64)
		if err == nil {
			return claimed{net.JoinHostPort(fmt.Sprint(at[0]), fmt.Sprint(at[1])), epoch}, nil
		}
	}
	return claimed{}, fmt.Errorf("sentinel %s: %w", s.addr, resp.Unexpected(replies, t.a.secrets()...))
}

// adopt records the server in an answer as the master, if that server reports that it is the
// master. If some sentinels have not answered, adopt ignores an answer whose epoch is lower than
// the known epoch, because the sentinel that gave it has missed a failover.
func (t *sentinels) adopt(ctx context.Context, w claimed, all bool) error {
	t.mu.Lock()
	was := t.master
	known := was != nil && was.addr == w.addr
	late := was != nil && w.epoch < t.epoch && !all
	if known && !late {
		t.epoch = w.epoch // the master may have changed and changed back meanwhile
	}
	t.mu.Unlock()
	if known || late {
		return nil
	}

	to := t.newMaster(w.addr)
	began := time.Now()
	// Keep the known master if this command fails. Ignore the reply, because the setup of each new
	// connection checks the role anyway.
	if r := to.Pipeline(ctx, []string{"role"})[0]; r.Err != nil {
		to.pool.Close()
		return fmt.Errorf("master %s: %w", w.addr, diagnose(r.Err, lockHints(t.a), time.Since(began)))
	}

	t.mu.Lock()
	t.master, t.epoch = to, w.epoch
	t.mu.Unlock()
	if was != nil {
		was.pool.Close() // also ends the subscriptions, which then move to the new master
	}
	return nil
}

// newMaster returns a server whose pool closes each new connection that does not lead to a master.
func (t *sentinels) newMaster(addr string) *server {
	setup := append(login(t.a.user, t.a.password, t.a.db), []string{"role"})
	return newServerOf(t.d.pool(t.a, addr, setup))
}

// isMaster reports whether a reply to ROLE comes from a master.
func isMaster(role any) bool {
	parts, _ := role.([]any)
	return slices.Index(parts, any("master")) == 0
}

var errNotMaster = errors.New("it is a replica and not the master (is a failover under way? try again)")
