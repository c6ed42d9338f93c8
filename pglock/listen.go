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
	freshFor       = 50 * time.Millisecond // how long a refusal may be returned again (see begin)
	keepsPlace     = 3 * time.Second       // how long a waiter stays in a line unless it asks again
)

// spot says what a caller waits for. All callers of a Client with the same spot have one place in
// the line of the key.
type spot struct {
	key    string
	shared bool
}

// waiter is the place of a spot in the line of its key. The place exists in the database only after
// a refused attempt.
type waiter struct {
	spot
	number       int64                  // names the waiter in the database; negative if it is shared
	wakeChannels map[chan struct{}]bool // of the callers that listen
	asking       int                    // attempts in flight
	lastAttempt  time.Time              // when it began
	token        string                 // of the last attempt whose caller will retry
	inLine       bool                   // the database may have the number
	heard        int                    // how many messages have come

	// refusal is the answer to the last attempt, unless a message has come since it began.
	refusal error
}

// isUnused reports whether no caller listens or asks for w now.
func (w *waiter) isUnused() bool { return len(w.wakeChannels) == 0 && w.asking == 0 }

// listener knows the waiters of a driver, and has the connection on which the driver receives
// messages about releases. Each Client has a channel of its own, so a message reaches one Client.
// The connection exists only while callers wait, because each NOTIFY takes time in every session
// that listens to any channel.
type listener struct {
	d      *driver
	client int64 // the number of this Client, which its channel and its waiters contain

	mu           sync.Mutex // guards the fields below
	waiters      map[spot]*waiter
	count        int64              // how many numbers were given to waiters
	purged       time.Time          // when waiters without callers were last removed
	lastChange   time.Time          // when a caller last began or ceased to listen
	listensSince time.Time          // when the present session began to listen; zero if there is none
	lastMessage  time.Time          // when the last message came
	running      bool               // the method run is running or about to start
	deaf         bool               // the last attempt to listen failed, so waiting callers poll
	hangUp       context.CancelFunc // ends the present session; nil before the first session
}

var errDeaf = errors.New("pglock: releases cannot be listened for")

func newListener(d *driver) *listener {
	// The number of a waiter contains client as its upper 32 bits, and must stay positive.
	return &listener{d: d, client: 1 + rand.Int64N(1<<31-1), waiters: map[spot]*waiter{}}
}

// channel is where the driver listens. The statements compute the same name from the number of a
// waiter.
func (l *listener) channel() string { return fmt.Sprint(l.d.channel, "_", l.client) }

// Listen registers a caller to be woken when its turn has come, or when a release may have been
// missed: whenever a session begins to listen, the driver wakes all callers. If no messages can
// come, Listen returns an error, or closes wake later. The caller must then poll.
func (d *driver) Listen(
	_ context.Context, c backend.Claim,
) (wake <-chan struct{}, stop func(), err error) {
	return d.listener.add(spot{c.Key, c.Shared})
}

// The method add does what Listen does, for a caller that waits at p.
func (l *listener) add(p spot) (<-chan struct{}, func(), error) {
	wake := make(chan struct{}, 1)

	l.mu.Lock()
	defer l.mu.Unlock()
	isDeaf := l.running && l.deaf // if run is not running, it is started below and tries again
	if isDeaf || l.d.bouncer.Load() || l.d.closing.Err() != nil {
		return nil, nil, errDeaf
	}
	w := l.waiterLocked(p)
	w.wakeChannels[wake] = true
	l.lastChange = time.Now()
	if !l.running {
		l.running = true
		l.deaf = false
		l.d.spawn(l.run)
	}

	return wake, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lastChange = time.Now()
		delete(w.wakeChannels, wake)
		if w.isUnused() && l.waiters[p] == w { // else w has ended already
			l.dropLocked(w)
		}
	}, nil
}

// waiterLocked returns the waiter of a spot, which it adds if there is none. At most once in 3 s
// (keepsPlace), it first removes the waiters that have no callers any more.
func (l *listener) waiterLocked(p spot) *waiter {
	if time.Since(l.purged) > keepsPlace {
		l.purged = time.Now()
		for p, w := range l.waiters {
			if w.isUnused() && time.Since(w.lastAttempt) > keepsPlace {
				delete(l.waiters, p) // its place in the database has ended as well
			}
		}
	}

	w := l.waiters[p]
	if w == nil {
		l.count++
		w = &waiter{
			spot:         p,
			number:       l.client<<32 | l.count&(1<<32-1), // the upper half names the channel
			wakeChannels: map[chan struct{}]bool{},
			lastAttempt:  time.Now(),
		}

		if p.shared {
			w.number = -w.number
		}
		l.waiters[p] = w
	}

	return w
}

// dropLocked forgets a waiter whose callers have left. It also starts a goroutine that removes the
// waiter from the line in the database, because there the waiter may keep others from the key. A
// later waiter of the same spot has another number, so the statement cannot remove the later one.
func (l *listener) dropLocked(w *waiter) {
	delete(l.waiters, w.spot)
	if !w.inLine || l.d.closing.Err() != nil {
		return
	}
	l.d.spawn(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		defer cancel()
		_ = l.d.quit(ctx, w.key, w.number, closeGrace) // if it fails, the place ends after 3 s
	})
}

// attempt is what the listener knows of an attempt in flight.
type attempt struct {
	*waiter       // nil if the caller will not wait and has no place in the line
	number  int64 // the number of the waiter, or zero
	heard   int   // the waiter's count of messages when the attempt began
	enters  entry // when the caller enters the line
}

// entry says when the caller of an attempt enters the line of its key.
type entry int

const (
	never     entry = iota // the caller will not wait, or it will poll for a shared hold
	ifReaders              // if shared holds refuse it: it polls, but its place keeps new ones out
	ifRefused              // if it is refused: it will listen
)

// begin returns a new attempt, for which the caller must later call end. If it returns a refusal
// instead, no attempt is needed, because the refusal is the answer to the last one and is still
// true.
//
// A refusal can be returned again because the engine repeats a refused attempt as soon as it
// listens, lest it miss a release in between. If the session was listening already when the refused
// attempt began, a release would have sent a message, and a message removes the stored refusal.
func (l *listener) begin(c backend.Claim) (a attempt, refusal error) {
	p := spot{c.Key, c.Shared}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !c.WillRetry && l.waiters[p] == nil {
		return attempt{}, nil // the caller has no place in the line
	}
	w := l.waiterLocked(p)
	wasListening := !l.listensSince.IsZero() && l.listensSince.Before(w.lastAttempt)
	isFresh := w.refusal != nil && time.Since(w.lastAttempt) < freshFor
	if c.WillRetry && wasListening && isFresh {
		refusal = w.refusal
		w.token = c.Token
		w.refusal = nil // return it only once
		return attempt{}, refusal
	}

	w.asking++
	w.lastAttempt = time.Now()
	w.refusal = nil
	a = attempt{waiter: w, number: w.number, heard: w.heard}
	if c.WillRetry {
		w.token = c.Token
	}
	switch {
	case !c.WillRetry: // do not enter, but send the number, because the waiter may be the heir
	case !l.deaf && !l.d.bouncer.Load():
		a.enters = ifRefused
	case !c.Shared:
		a.enters = ifReaders
	}

	return a, nil
}

// end records err, the outcome of an attempt; nil means a grant.
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
		w.inLine = w.inLine || a.enters != never // after an outage too, the place may exist
		if errors.Is(err, backend.ErrHeld) && w.heard == a.heard {
			w.refusal = err // no message has come since the attempt began, so it is still true
		}
	case w.asking > 0 || len(w.wakeChannels) > 1: // one channel may be of the caller with the grant
		w.wakeLocked() // the grant has taken the number out of the line, so the others must ask again
	default: // no other caller waits at this spot
		w.inLine = false
		if len(w.wakeChannels) == 0 {
			delete(l.waiters, w.spot)
		}
	}
}

// forget forgets the waiter of a spot if the last attempt of that waiter had the token, and no
// caller listens or asks for it any more. It returns the waiter's number, which the caller must
// remove from the line. If there is no such waiter, or the database cannot have its number, forget
// returns 0.
func (l *listener) forget(p spot, token string) (number int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.waiters[p]
	isCallers := w != nil && w.token == token
	if !isCallers || !w.isUnused() || !w.inLine {
		return 0
	}
	delete(l.waiters, p)
	return w.number
}

// wakeLocked wakes the callers of a waiter. The stored refusal is out of date then.
func (w *waiter) wakeLocked() {
	w.heard++
	w.refusal = nil
	for wake := range w.wakeChannels {
		select {
		case wake <- struct{}{}:
		default: // an earlier signal is still unread, and its reader will ask after this release
		}
	}
}

// The method wake wakes the callers of the waiter that a message names.
func (l *listener) wake(message string) {
	number, _ := strconv.ParseInt(message, 10, 64) // of a strange message 0, which no waiter has
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastMessage = time.Now()
	for _, w := range l.waiters {
		if w.number == number {
			w.wakeLocked()
		}
	}
}

// vouches reports whether a connection that was idle for that time needs no check. This is so if
// the time is short, and a message has just come in a session that began before it. The message
// shows that the server was not restarted meanwhile.
func (l *listener) vouches(idle time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	isOlder := !l.listensSince.IsZero() && time.Since(l.listensSince) > idle
	return isOlder && idle < checkListening && time.Since(l.lastMessage) < checkIdle
}

// setDeaf records whether the listener is deaf, which means that it receives no messages. If so, it
// closes the wake channels of all callers, who then poll. Otherwise a session has just begun to
// listen, and setDeaf wakes all callers, because releases may have been missed before.
func (l *listener) setDeaf(deaf bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deaf = deaf
	l.listensSince = time.Time{}
	if !deaf {
		l.listensSince = time.Now()
	}
	for _, w := range l.waiters {
		if !deaf {
			w.wakeLocked()
			continue
		}
		for wake := range w.wakeChannels {
			close(wake)
		}
		clear(w.wakeChannels)
	}
}

// idle reports whether no caller has listened during the last 5 s (lingers). If so, and endsRun is
// true, it also records that the method run is not running. Then run must end, because the next
// caller that listens starts it again.
func (l *listener) idle(endsRun bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.lastChange) < lingers {
		return false
	}
	for _, w := range l.waiters {
		if len(w.wakeChannels) > 0 {
			return false
		}
	}

	if endsRun {
		l.running = false
	}
	return true
}

// The method run listens until no caller has listened for 5 s (lingers), or the driver is closed.
func (l *listener) run() {
	ctx := l.d.closing
	for ctx.Err() == nil && !l.idle(true) {
		within, end := context.WithCancel(ctx)
		l.mu.Lock()
		l.hangUp = end
		l.mu.Unlock()
		failed := l.session(within)
		end()
		if !failed || ctx.Err() != nil {
			continue // the loop ends, unless a caller has begun to listen since the session ended
		}
		l.setDeaf(true)

		select {
		case <-time.After(listenAgain):
		case <-ctx.Done():
		}
	}
}

// endSession ends the session, if any, and run begins another one. It is called when the server may
// be a replica now.
func (l *listener) endSession() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hangUp != nil {
		l.hangUp()
	}
}

// session connects and listens until no caller has listened for 5 s (lingers), ctx ends, or the
// connection fails. The result failed is false only in the first case.
func (l *listener) session(ctx context.Context) (failed bool) {
	c, err := l.d.connect(ctx)
	if err != nil {
		return true
	}
	defer func() {
		l.mu.Lock()
		l.listensSince = time.Time{}
		l.mu.Unlock()
		bye, cancel := context.WithTimeout(context.Background(), closeGrace/2)
		defer cancel()
		c.Close(bye)
	}()

	within, cancel := context.WithTimeout(ctx, checkListening)
	// The simple protocol takes one round trip and prepares nothing.
	_, err = c.Exec(within, "LISTEN "+l.channel(), pgx.QueryExecModeSimpleProtocol)
	cancel()
	if err != nil {
		return true
	}
	l.setDeaf(false)
	for {
		within, cancel := context.WithTimeout(ctx, checkListening)
		n, err := c.WaitForNotification(within)
		isQuiet := within.Err() != nil && ctx.Err() == nil // no message has come for 3 s
		cancel()
		if err == nil {
			l.wake(n.Payload)
		} else if !isQuiet {
			return true // the connection has failed, or ctx has ended
		}

		// Check this after each message too, because messages may leave no quiet moment.
		if l.idle(false) {
			return false
		}
		if err != nil {
			// There was no message. Find out whether the connection still works. Until a ping fails,
			// no message wakes the callers, but they try once a second.
			within, cancel := context.WithTimeout(ctx, checkListening)
			err := c.Ping(within)
			cancel()
			if err != nil {
				return true
			}
		}
	}
}

// connect opens a connection beside the pool, with the pool's settings. As the pool would, it calls
// BeforeConnect.
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
