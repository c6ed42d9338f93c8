package fairlock

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore"
)

// silent is how a client hears that the server refuses a channel: not at all.
// It looks instead.
const silent = "-"

// unheardFor is how long after a look a message may still come that was sent
// before it.
const unheardFor = time.Second

// ear is a channel of this client that is listened to for all keys whose
// scripts can publish on it.
type ear struct {
	channel  string
	how      string               // the command that publishes on it, or silent
	listener *redisstore.Listener // nil if silent

	// Driver.mu guards these.
	users  int // waiters
	missed int // how often messages may have been missed
}

// listen returns when the channel for key is listened to, for one more waiter.
func (d *Driver) listen(ctx context.Context, key string) (*ear, error) {
	name := d.store.Channel("grant:"+d.id, key)
	if e := d.useEar(name, nil); e != nil {
		return e, nil
	}
	e := &ear{channel: name, how: "PUBLISH"}
	l, err := d.store.Listen(ctx, name, redisstore.LockKey(key), func(payload string, again bool) {
		if again {
			d.missed(e)
		} else {
			d.heard(payload)
		}
	})
	switch {
	case err == nil && d.store.Sharded():
		e.listener, e.how = l, "SPUBLISH"
	case err == nil:
		e.listener = l
	case redis.HasErrorPrefix(err, "NOPERM"):
		e.how = silent
	default:
		return nil, err
	}
	used := d.useEar(name, e)
	if used != e && l != nil {
		l.Close()
	}
	return used, nil
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
	if last && e.listener != nil {
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
	if t := d.expected[f[0]]; t != nil {
		t.Stop()
		delete(d.expected, f[0])
	}
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
// A grant to a token that was given up is passed on. The caller holds mu.
func (d *Driver) concerned(token, round string) *waiter {
	w := d.waiters[token]
	if w == nil {
		if c, ok := d.doubts[token]; ok && c.over {
			d.undoLocked(c.c, 1, 0)
		}
		return nil
	}
	if strconv.Itoa(w.round) != round || w.told != nil {
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

// expect has e listen anew if no message comes for a token that the store says
// was granted. The caller holds mu.
func (d *Driver) expect(e *ear, token string) {
	if e.listener == nil || d.closed {
		return
	}
	d.expected[token] = time.AfterFunc(unheardFor, func() {
		d.mu.Lock()
		unheard := d.expected[token] != nil && !d.closed
		delete(d.expected, token)
		d.mu.Unlock()
		if unheard {
			e.listener.Relisten()
		}
	})
}
