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

// sentinels finds the master for each new connection. It asks all sentinels, and uses the answer
// with the highest epoch. It asks again after the duration searchEvery. If another server is the
// master then, sentinels closes the connections to the old one, and go-redis makes others.
type sentinels struct {
	d      *dialer
	master string
	asked  []*redis.Client
	timer  *time.Timer // starts the next search

	mu          sync.Mutex      // guards the fields below
	addr        string          // of the master; empty if it is not known
	run         string          // the run ID of the master, or ""
	epoch       int64           // of the answer that named the master
	era         context.Context // ends when another server becomes the master
	endEra      context.CancelCauseFunc
	unreachable bool          // the last dial to addr has failed
	last        *search       // nil before the first one
	wait        time.Duration // how long the result of the last search is used
}

// searchEvery limits how long hasp uses a demoted master that does not know yet that it was
// demoted, and still accepts writes.
const searchEvery = 10 * time.Second

// masterConn is a connection to a master. It is closed when another server becomes the master.
type masterConn struct {
	rawConn
	stop func() bool // the era no longer closes the connection
}

func (c *masterConn) Close() error {
	c.stop()
	return c.rawConn.Close()
}

// newSentinels returns the sentinels of a URL, which are asked again and again from now on.
func newSentinels(d *dialer, a address) *sentinels {
	t := &sentinels{d: d, master: a.master}
	t.era, t.endEra = context.WithCancelCause(d.open)
	a.user = a.sentinelUser
	a.password = a.sentinelPassword
	a.db = 0
	for _, addr := range a.addrs {
		t.asked = append(t.asked, redis.NewClient(d.options(a, addr).Simple()))
	}

	t.timer = time.AfterFunc(searchEvery, func() { t.start(0) })
	return t
}

// dialMaster is the Dialer of a client for the master.
func (t *sentinels) dialMaster(ctx context.Context, _, _ string) (net.Conn, error) {
	return failLater(t.dial(ctx))
}

// dial finds the master, and makes a connection to it. The dial ends, and the connection is closed
// later, when another server becomes the master. It notes whether the master can be reached.
func (t *sentinels) dial(ctx context.Context) (net.Conn, error) {
	addr, era, err := t.find(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(era, cancel)() // the end of the era ends the dial, until dial returns
	conn, err := t.d.connect(ctx, addr)
	if context.Cause(era) == errReplaced { // the connection would lead to the old master
		if err == nil {
			conn.Close()
		}
		return nil, errReplaced
	}

	t.mu.Lock()
	if addr == t.addr { // it is still the address of the master
		t.unreachable = err != nil
		t.reachedLocked(err == nil)
	}

	t.mu.Unlock()
	if err != nil {
		// diagnose shows the duration only if the dial has timed out. Then it lasted that long.
		return nil, located{fmt.Errorf("master %s: %w", addr,
			diagnose(err, hints{}, time.Duration(t.d.timeout.Load())))}
	}
	base := conn.(rawConn)
	return &masterConn{base, context.AfterFunc(era, func() { base.Close() })}, nil
}

// isMaster returns an error if a new connection leads to a server that is not a master, or whose
// role is not known.
func isMaster(ctx context.Context, conn *redis.Conn) error {
	role, err := conn.Do(ctx, "role").Slice()
	if err == nil && slices.Index(role, any("master")) != 0 { // the first element is the role
		err = errNotMaster
	}
	return err
}

var errNotMaster = errors.New("it is not a master (is a failover under way? try again)")

// claimed is a sentinel's answer: the address of the master, its run ID, and the epoch.
type claimed struct {
	addr, run string
	epoch     int64
}

// search is one search for the master.
type search struct {
	done  chan struct{} // closed when the fields below are set
	addr  string
	era   context.Context // ends when another server becomes the master
	err   error
	ended time.Time
}

// find returns the master. Concurrent callers share a search. While the master or the sentinels
// cannot be reached, find may return the result of the last search, because many callers may repeat
// their calls.
func (t *sentinels) find(ctx context.Context) (addr string, era context.Context, err error) {
	s := t.start(0)
	select {
	case <-s.done:
		return s.addr, s.era, s.err
	case <-ctx.Done():
		return "", nil, ctx.Err()
	}
}

// start starts a search and returns it. If a search is in progress, or has ended a short time ago,
// start returns that search instead. The short time is t.wait, or atLeast if that is longer.
func (t *sentinels) start(atLeast time.Duration) *search {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.last // its field ended is zero while it is in progress
	if s != nil && (s.ended.IsZero() || time.Since(s.ended) < max(t.wait, atLeast)) {
		return s
	}
	s = &search{done: make(chan struct{})}
	t.last = s
	go func() {
		defer close(s.done)
		s.addr, s.era, s.err = t.search()
		t.mu.Lock()
		defer t.mu.Unlock()
		s.ended = time.Now()
		t.reachedLocked(s.err == nil && !t.unreachable)
	}()

	return s
}

// reachedLocked sets how long the result of a search is used: not at all if the master and a
// sentinel can be reached, and otherwise for the duration pause.
func (t *sentinels) reachedLocked(ok bool) {
	t.wait = pause
	if ok {
		t.wait = 0
	}
}

// search asks all sentinels for the master, adopts the answer with the highest epoch, and returns
// the known master. At the end, it sets the timer for the next search.
func (t *sentinels) search() (addr string, era context.Context, err error) {
	if t.d.open.Err() != nil {
		return "", nil, redis.ErrClosed
	}
	defer t.timer.Reset(searchEvery)
	ctx, cancel := context.WithTimeout(t.d.open, time.Duration(t.d.timeout.Load()))
	defer cancel()
	answers, errs := askAll(ctx, t.asked, 0, grace, t.ask)
	if len(answers) == 0 {
		return "", nil, located{worst(errs, "sentinels")}
	}
	last := slices.MaxFunc(answers, func(a, b claimed) int { return cmp.Compare(a.epoch, b.epoch) })
	addr, era = t.adopt(last, len(answers) == len(t.asked))
	return addr, era, nil
}

// ask queries one sentinel. It asks for the epoch first, so that the address is not older than the
// epoch. A separate command asks for the address, because during a failover the reply with the
// epoch still contains the old master's address.
func (t *sentinels) ask(ctx context.Context, s *redis.Client) (claimed, error) {
	began := time.Now()
	var replies [2][]any
	for i, what := range []string{"master", "get-master-addr-by-name"} {
		reply, err := s.Do(ctx, "sentinel", what, t.master).Result()
		if err != nil {
			return claimed{}, fmt.Errorf("sentinel %s: %w", s.Options().Addr,
				diagnose(err, sentinelHints, time.Since(began)))
		}
		replies[i], _ = reply.([]any)
	}

	address := replies[1]
	epoch, err := strconv.ParseInt(field(replies[0], "config-epoch"), 10, 64)
	if len(address) != 2 || err != nil {
		return claimed{}, fmt.Errorf("sentinel %s: %w", s.Options().Addr, resp.Unexpected(replies))
	}
	c := claimed{
		addr:  net.JoinHostPort(fmt.Sprint(address[0]), fmt.Sprint(address[1])),
		epoch: epoch,
	}

	// During a failover, the first reply is still about the old master. Do not use its run ID then.
	if c.addr == net.JoinHostPort(field(replies[0], "ip"), field(replies[0], "port")) {
		c.run = field(replies[0], "runid")
	}
	return c, nil
}

// field returns a field of a reply that has names and values in turn, or "".
func field(reply []any, name string) string {
	i := slices.Index(reply, any(name))
	if i < 0 || i+1 >= len(reply) {
		return ""
	}
	return fmt.Sprint(reply[i+1])
}

// adopt records the master in the answer c, which has the highest epoch of all answers, and returns
// the known master. The argument allAnswered says whether all sentinels have answered.
func (t *sentinels) adopt(c claimed, allAnswered bool) (addr string, era context.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()

	// A sentinel that reports an epoch below the known one has missed a failover. Ignore its answer
	// if some sentinels have not answered, because one of them may know the new master. If all have
	// answered, none knows that failover, for example because they were set up anew. Then the
	// answer counts.
	if !allAnswered && c.epoch < t.epoch {
		return t.addr, t.era
	}
	t.epoch = c.epoch

	// Sentinels may name one master by several addresses. Keep the known address of the same
	// master, unless that address cannot be reached.
	isSame := c.run != "" && c.run == t.run
	keepsAddr := isSame && !t.unreachable
	if c.addr != t.addr && !keepsAddr {
		t.endEra(errReplaced)
		t.era, t.endEra = context.WithCancelCause(t.d.open)
		t.addr = c.addr
		t.unreachable = false
	}

	t.run = c.run
	return t.addr, t.era
}

// known returns the address of the master, or "".
func (t *sentinels) known() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.addr
}
