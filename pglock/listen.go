package pglock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

const (
	checkListening = 3 * time.Second       // without a message for so long, the connection is checked
	listenAgain    = time.Second           // the pause after a failure
	lingers        = 5 * time.Second       // without waiters for so long, the connection is closed
	freshFor       = 50 * time.Millisecond // how long an answer may be given again
	keepsPlace     = 3 * time.Second       // how long a waiter stays in a line unless it asks again
)

// spot is what the callers of a Client wait for at one place in the line of a key.
type spot struct {
	key    string
	shared bool
}

// waiter is a place in the line of a key. The exclusive callers of a Client have one place
// together, and so have the shared ones.
type waiter struct {
	spot
	number int64                  // names the waiter in the database; negative if the place is shared
	wakes  map[chan struct{}]bool // the wake channels of the callers that listen
	asking int                    // attempts in flight
	asked  time.Time              // when the last attempt began
	token  string                 // of the last attempt
	inLine bool                   // the database may have the number
	heard  int                    // how many messages have come

	// refusal is the answer to the last attempt, unless a message has come since it began.
	refusal error
}

// listener knows the waiters of a driver, and has the connection on which the driver receives
// messages about releases. Each Client has a channel of its own, so a message reaches one Client.
// The connection exists only while callers wait, because each NOTIFY takes time in every session
// that listens to any channel.
type listener struct {
	d      *driver
	client int64 // the number of this Client, which its channel and its waiters contain

	mu      sync.Mutex // guards the fields below
	waits   map[spot]*waiter
	count   int64     // how many numbers were given to waiters
	purged  time.Time // when waiters without callers were last removed
	last    time.Time // when a wait last began or ended
	since   time.Time // when the present session began to listen; zero if there is none
	message time.Time // when the last message came
	running bool
	deaf    bool               // the last attempt to listen failed, so waiting callers poll
	hangUp  context.CancelFunc // ends the present session; nil before the first session
}

var errDeaf = errors.New("pglock: releases cannot be listened for")

func newListener(d *driver) *listener {
	return &listener{d: d, client: 1 + rand.Int64N(1<<31-1), waits: map[spot]*waiter{}}
}

// channel is where the driver listens. The statements compute the same name from the number of a
// waiter.
func (l *listener) channel() string { return fmt.Sprint(l.d.channel, "_", l.client) }

// Listen registers a caller to be woken when its turn has come. When listening begins, the driver
// wakes all callers.
func (d *driver) Listen(
	_ context.Context, c backend.Claim,
) (wake <-chan struct{}, stop func(), err error) {
	return d.listener.add(spot{c.Key, c.Shared})
}

func (l *listener) add(p spot) (<-chan struct{}, func(), error) {
	wake := make(chan struct{}, 1)

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.d.bouncer.Load() || l.running && l.deaf || l.d.closing.Err() != nil {
		return nil, nil, errDeaf
	}
	w := l.waiterLocked(p)
	w.wakes[wake] = true
	l.last = time.Now()
	if !l.running {
		l.running = true
		l.deaf = false
		l.d.spawn(l.run)
	}

	return wake, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.last = time.Now()
		delete(w.wakes, wake)
		if len(w.wakes) == 0 && w.asking == 0 && l.waits[p] == w {
			l.dropLocked(w)
		}
	}, nil
}

// waiterLocked returns the waiter of a place, which it adds if there is none.
func (l *listener) waiterLocked(p spot) *waiter {
	if time.Since(l.purged) > keepsPlace {
		l.purged = time.Now()
		for p, w := range l.waits {
			if len(w.wakes) == 0 && w.asking == 0 && time.Since(w.asked) > keepsPlace {
				delete(l.waits, p) // its caller has left, and the database has forgotten it
			}
		}
	}

	w := l.waits[p]
	if w == nil {
		l.count++
		w = &waiter{
			spot:   p,
			number: l.client<<32 | l.count&(1<<32-1),
			wakes:  map[chan struct{}]bool{},
			asked:  time.Now(),
		}

		if p.shared {
			w.number = -w.number
		}
		l.waits[p] = w
	}

	return w
}

// dropLocked forgets a waiter whose callers have left. The database must forget it as well, because
// the waiter may keep others from the key. A later waiter of the place has another number, so the
// statement cannot remove that one.
func (l *listener) dropLocked(w *waiter) {
	delete(l.waits, w.spot)
	if !w.inLine || l.d.closing.Err() != nil {
		return
	}
	l.d.spawn(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		defer cancel()
		_ = l.d.quit(ctx, w.key, w.number, closeGrace) // if it fails, the place ends after 3 s
	})
}

// attempt is an attempt of a caller that waits.
type attempt struct {
	*waiter       // nil if no caller waits
	number  int64 // the number of the waiter, or zero
	heard   int   // how many messages had come before
	enters  entry // whether a refused attempt enters the line
}

// entry says when a refused attempt enters the line of its key.
type entry int

const (
	never     entry = iota // the caller will not wait, or only poll
	ifReaders              // the caller polls, but its place keeps new shared holds out
	ifRefused
)

// begin begins an attempt.
//
// The engine repeats an attempt when it has begun to listen. If the session listened already when
// the last attempt began, a change would have sent a message. So the last refusal is returned
// again.
func (l *listener) begin(c backend.Claim) (a attempt, refusal error) {
	p := spot{c.Key, c.Shared}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !c.WillRetry && l.waits[p] == nil {
		return attempt{}, nil
	}
	w := l.waiterLocked(p)
	listened := !l.since.IsZero() && l.since.Before(w.asked)
	if c.WillRetry && listened && w.refusal != nil && time.Since(w.asked) < freshFor {
		refusal = w.refusal
		w.token = c.Token
		w.refusal = nil
		return attempt{}, refusal
	}

	w.asking++
	w.asked = time.Now()
	w.refusal = nil
	a = attempt{waiter: w, number: w.number, heard: w.heard}
	if c.WillRetry {
		w.token = c.Token
	}
	switch {
	case !c.WillRetry: // the last attempt of a caller that may be the heir
	case !l.deaf && !l.d.bouncer.Load():
		a.enters = ifRefused
	case !c.Shared:
		a.enters = ifReaders
	}

	return a, nil
}

// end records the outcome of an attempt.
func (l *listener) end(a attempt, err error) {
	w := a.waiter
	if w == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	w.asking--
	switch {
	case err != nil:
		w.inLine = w.inLine || a.enters != never
		if errors.Is(err, backend.ErrHeld) && w.heard == a.heard {
			w.refusal = err
		}
	case w.asking > 0 || len(w.wakes) > 1:
		w.wakeLocked() // the grant has taken the number out of the line, so the others must ask again
	default:
		w.inLine = false
		if len(w.wakes) == 0 {
			delete(l.waits, w.spot)
		}
	}
}

// forget forgets a waiter that no caller listens for any more, and whose last attempt had a token.
// It returns the number of the waiter if the database may have it.
func (l *listener) forget(p spot, token string) (number int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.waits[p]
	if w == nil || w.token != token || w.asking > 0 || len(w.wakes) > 0 || !w.inLine {
		return 0
	}
	delete(l.waits, p)
	return w.number
}

// wakeLocked wakes the callers of a waiter.
func (w *waiter) wakeLocked() {
	w.heard++
	w.refusal = nil
	for wake := range w.wakes {
		select {
		case wake <- struct{}{}:
		default: // the attempt that the earlier signal causes will begin after this release
		}
	}
}

// The method wake wakes the callers of the waiter that a message names.
func (l *listener) wake(message string) {
	number, _ := strconv.ParseInt(message, 10, 64)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.message = time.Now()
	for _, w := range l.waits {
		if w.number == number {
			w.wakeLocked()
		}
	}
}

// vouches reports whether a connection that was idle for a short time needs no check, because a
// message has just come on a session that is older. So the server was not restarted in that time.
func (l *listener) vouches(idle time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	isOlder := !l.since.IsZero() && time.Since(l.since) > idle
	return isOlder && idle < checkListening && time.Since(l.message) < checkIdle
}

// setDeaf records whether the listener is deaf. If so, it closes the channels of all
// callers, who then poll. Otherwise it wakes them, because releases may have been missed.
func (l *listener) setDeaf(deaf bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deaf = deaf
	l.since = time.Time{}
	if !deaf {
		l.since = time.Now()
	}
	for _, w := range l.waits {
		if !deaf {
			w.wakeLocked()
			continue
		}
		for wake := range w.wakes {
			close(wake)
		}
		clear(w.wakes)
	}
}

// idle reports whether no caller has listened during the last 5 s (lingers). If so, and the
// parameter ends is true, the method run must end, because a later wait starts it again.
func (l *listener) idle(ends bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.last) < lingers {
		return false
	}
	for _, w := range l.waits {
		if len(w.wakes) > 0 {
			return false
		}
	}

	l.running = l.running && !ends
	return true
}

// The method run listens until no caller has listened for 5 s (lingers), or the driver is closed.
func (l *listener) run() {
	for ctx := l.d.closing; ctx.Err() == nil && !l.idle(true); {
		within, end := context.WithCancel(ctx)
		l.mu.Lock()
		l.hangUp = end
		l.mu.Unlock()
		failed := l.session(within)
		end()
		if !failed || ctx.Err() != nil {
			continue // if a wait has just begun, the loop goes on
		}
		l.setDeaf(true)

		select {
		case <-time.After(listenAgain):
		case <-ctx.Done():
		}
	}
}

// endSession ends the session, if any. It is called when the server may be a replica now.
func (l *listener) endSession() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hangUp != nil {
		l.hangUp()
	}
}

// session connects and listens until no caller waits any more, ctx ends, or the connection fails.
func (l *listener) session(ctx context.Context) (failed bool) {
	c, err := l.d.connect(ctx)
	if err != nil {
		return true
	}
	defer func() {
		l.mu.Lock()
		l.since = time.Time{}
		l.mu.Unlock()
		bye, cancel := context.WithTimeout(context.Background(), closeGrace/2)
		defer cancel()
		c.Close(bye)
	}()

	within, cancel := context.WithTimeout(ctx, checkListening)
	_, err = c.Exec(within, "LISTEN "+l.channel(), pgx.QueryExecModeSimpleProtocol)
	cancel()
	if err != nil {
		return true
	}
	l.setDeaf(false)
	for {
		within, cancel := context.WithTimeout(ctx, checkListening)
		n, err := c.WaitForNotification(within)
		quiet := within.Err() != nil
		cancel()
		if err == nil {
			l.wake(n.Payload)
		} else if ctx.Err() != nil || !quiet {
			return true
		}

		// Check this after each message too, because messages may leave no quiet moment.
		if l.idle(false) {
			return false
		}
		if err != nil {
			// Find out whether the connection is half open. Meanwhile the callers try once a
			// second.
			within, cancel := context.WithTimeout(ctx, checkListening)
			err := c.Ping(within)
			cancel()
			if err != nil {
				return true
			}
		}
	}
}

// connect opens a connection beside the pool, with the pool's settings.
func (d *driver) connect(ctx context.Context) (*pgx.Conn, error) {
	cfg := d.statements.Config()
	boundConnect(cfg.ConnConfig)
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return nil, err
		}
	}

	return pgx.ConnectConfig(ctx, cfg.ConnConfig)
}
