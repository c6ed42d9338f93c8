package pglock

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

const (
	checkListening = 3 * time.Second // after this time without a message, the connection is checked
	listenAgain    = time.Second     // the pause after a failure
	lingers        = 5 * time.Second // after this time without waiters, the connection is closed
)

// message returns the text that a release of key sends. Two keys may have the same text. If so, a
// release of one key makes waiters of the other key try too early, which is harmless.
func message(key string) string {
	h := fnv.New64a()
	h.Write([]byte(key))
	return fmt.Sprintf("%x", h.Sum64())
}

// listener is the connection on which a driver receives messages about releases. The connection
// exists only while callers wait, because each NOTIFY takes time in every session that listens.
type listener struct {
	d *driver

	mu      sync.Mutex                        // guards the fields below
	waits   map[string]map[chan struct{}]bool // maps each message to the wake channels of the callers that wait for it
	last    time.Time                         // when a wait last began or ended
	running bool
	deaf    bool               // the last attempt to listen failed, so waiting callers poll
	end     context.CancelFunc // ends the present session; nil before the first session
}

var errDeaf = errors.New("pglock: releases cannot be listened for")

// Listen registers a caller to be woken by the next release. That release sends a message, because
// a refused attempt has marked the row. When listening begins, the driver wakes all callers.
func (d *driver) Listen(_ context.Context, c backend.Claim) (wake <-chan struct{}, stop func(), err error) {
	return d.listener.add(message(c.Key))
}

func (l *listener) add(m string) (<-chan struct{}, func(), error) {
	wake := make(chan struct{}, 1)

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.d.bouncer.Load() || l.running && l.deaf || l.d.closing.Err() != nil {
		return nil, nil, errDeaf
	}
	if l.waits[m] == nil {
		l.waits[m] = map[chan struct{}]bool{}
	}
	l.waits[m][wake] = true
	l.last = time.Now()
	if !l.running {
		l.running, l.deaf = true, false
		l.d.wg.Go(l.run)
	}

	return wake, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.waits[m], wake)
		if len(l.waits[m]) == 0 {
			delete(l.waits, m)
		}
		l.last = time.Now()
	}, nil
}

// hears reports whether releases wake waiting callers, or will soon do so.
func (l *listener) hears() bool {
	if l.d.bouncer.Load() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.deaf
}

// wakeLocked wakes the callers that wait for the message m.
func (l *listener) wakeLocked(m string) {
	for wake := range l.waits[m] {
		select {
		case wake <- struct{}{}:
		default: // the attempt that the earlier signal causes will begin after this release
		}
	}
}

// The method set records whether the listener is deaf. If so, it closes the channels of all
// callers, who then poll. Otherwise it wakes them, because releases may have been missed.
func (l *listener) set(deaf bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deaf = deaf
	for m, wakes := range l.waits {
		if !deaf {
			l.wakeLocked(m)
			continue
		}
		for wake := range wakes {
			close(wake)
		}
		delete(l.waits, m)
	}
}

// idle reports whether no caller has waited during the last 5 s (lingers). If so, and the parameter
// ends is true, the method run must end, because a later wait starts it again.
func (l *listener) idle(ends bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	idle := len(l.waits) == 0 && time.Since(l.last) >= lingers
	l.running = l.running && !(idle && ends)
	return idle
}

// The method run listens until no caller waits any more, or the driver is closed.
func (l *listener) run() {
	for ctx := l.d.closing; ctx.Err() == nil && !l.idle(true); {
		within, end := context.WithCancel(ctx)
		l.mu.Lock()
		l.end = end
		l.mu.Unlock()
		failed := l.session(within)
		end()
		if !failed || ctx.Err() != nil {
			continue // the loop goes on if a wait has just begun
		}
		l.set(true)

		select {
		case <-time.After(listenAgain):
		case <-ctx.Done():
		}
	}
}

// The method leave ends the session, if any. It is called when the server may be a replica now.
func (l *listener) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil {
		l.end()
	}
}

// session connects and listens until no caller waits any more, ctx ends, or the connection fails.
func (l *listener) session(ctx context.Context) (failed bool) {
	c, err := l.d.connect(ctx)
	if err != nil {
		return true
	}
	defer func() {
		bye, cancel := context.WithTimeout(context.Background(), closeGrace/2)
		defer cancel()
		c.Close(bye)
	}()

	within, cancel := context.WithTimeout(ctx, checkListening)
	_, err = c.Exec(within, "LISTEN "+l.d.channel, pgx.QueryExecModeSimpleProtocol)
	cancel()
	if err != nil {
		return true
	}
	l.set(false)
	for {
		within, cancel := context.WithTimeout(ctx, checkListening)
		n, err := c.WaitForNotification(within)
		quiet := within.Err() != nil
		cancel()
		if err == nil {
			l.mu.Lock()
			l.wakeLocked(n.Payload)
			l.mu.Unlock()
		} else if ctx.Err() != nil || !quiet {
			return true
		}
		// Check this after each message too, because the messages of other Clients may leave no
		// quiet moment.
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
	cfg := d.pool.Config()
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = hasp.DefaultTimeout // for each host, because a caller's pool may have no timeout
	}
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return nil, err
		}
	}
	return pgx.ConnectConfig(ctx, cfg.ConnConfig)
}
