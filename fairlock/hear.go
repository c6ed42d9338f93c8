package fairlock

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// silent marks an entry whose client cannot receive a message about a grant. The
// client has no subscription, because its user may not subscribe or the server
// takes no more connections. It keeps its place and checks the key instead.
const silent = "-"

// listenWithin bounds how long a waiter without a place waits for a
// subscription.
const listenWithin = time.Second

// ear is a channel of this client that is listened to for all keys whose
// scripts can publish on it.
type ear struct {
	channel  string
	listener *redisstore.Listener

	// Driver.mu guards these.
	users  int // waiters
	missed int // how often messages may have been missed
}

// how returns the command that publishes on e, or silent.
func (e *ear) how() string {
	if how := e.listener.Command(); how != "" {
		return how
	}
	return silent
}

// listen returns the ear of the channel for c.Key, for one more waiter. It blocks
// until the subscription is confirmed, or until that takes too long.
func (d *Driver) listen(ctx context.Context, c backend.Claim) *ear {
	name := d.store.Channel("grant:"+d.id, c.Key)
	if e := d.useEar(name, nil); e != nil {
		return e
	}

	// Leave most of the time for the call that takes a place in the queue.
	ctx, cancel := context.WithTimeout(ctx, min(c.Timeout/3, listenWithin))
	defer cancel()
	e := &ear{channel: name}
	e.listener, _ = d.store.Subscribe(ctx, name, redisstore.LockKey(c.Key), func(payload string, again bool) {
		if again {
			d.missed(e)
		} else {
			d.heard(payload)
		}
	})

	used := d.useEar(name, e)
	if used != e {
		e.listener.Close()
	}
	return used
}

// useEar returns the ear of that name, for one more waiter, which is e if there
// was none.
func (d *Driver) useEar(name string, e *ear) *ear {
	d.mu.Lock()
	defer d.mu.Unlock()
	if old := d.ears[name]; old != nil {
		e = old
	}
	if e != nil {
		d.ears[name] = e
		e.users++
	}
	return e
}

// unlisten is the end of a waiter's use of e.
func (d *Driver) unlisten(e *ear) {
	d.mu.Lock()
	e.users--
	last := e.users == 0
	if last {
		delete(d.ears, e.channel)
	}
	d.mu.Unlock()
	if last {
		e.listener.Close()
	}
}

// missed has all look again who listen by e.
func (d *Driver) missed(e *ear) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.missed++
	now := time.Now()
	for _, l := range d.lines {
		if l.ear == e {
			l.lookBy(now)
		}
	}
}

// heard takes a message: token, round, and fence or - if there is none for it.
func (d *Driver) heard(payload string) {
	f := strings.Fields(payload)
	if len(f) != 3 {
		return // somebody else's
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.concerned(f[0], f[1])
	if w == nil {
		return
	}
	if f[2] == "-" {
		w.gone = noFence(w.c.Key)
	} else if w.told = w.toldOf(f[2]); w.told == nil {
		return // nobody of hasp's; the next look tells
	}
	w.poke()
}

// concerned returns the waiter of a grant, unless it has got that one already.
// The caller holds mu.
func (d *Driver) concerned(token, round string) *waiter {
	w := d.waiters[token]
	if w == nil || strconv.Itoa(w.round) != round || w.told != nil {
		return nil
	}
	return w
}

// toldOf is a grant with that fence, or nil if it is none that w can have.
func (w *waiter) toldOf(fence string) *told {
	n, err := strconv.ParseUint(fence, 10, 64)
	if err != nil || w.c.Fenced && n == 0 {
		return nil
	}
	return &told{fence: n}
}
