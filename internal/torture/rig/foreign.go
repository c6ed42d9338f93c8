package rig

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
)

// Locker is a client of another library, used as the documentation of that library says.
type Locker interface {
	// Lock waits for a key until it has it or ctx has ended.
	Lock(ctx context.Context, key string) (Held, error)

	Close() error
}

// Held is a lock of a Locker.
type Held interface {
	// Lost is closed when the program learns that the lock is lost.
	Lost() <-chan struct{}

	// Until is the moment until which the library says that the program has the lock. It
	// is zero if the library does not say.
	Until() time.Time

	Unlock(context.Context) error
}

// Renewing is the part of a Held whose library leaves it to the program to renew the lock.
type Renewing struct {
	lost chan struct{}
	end  chan struct{}
}

// Renew calls renew each third of a term, until it fails or End is called. After an error the
// program no longer relies on the lock.
func Renew(term time.Duration, renew func(context.Context) error) Renewing {
	r := Renewing{make(chan struct{}), make(chan struct{})}
	go func() {
		t := time.NewTicker(term / 3)
		defer t.Stop()
		for {
			select {
			case <-t.C:
			case <-r.end:
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), term/3)
			err := renew(ctx)
			cancel()
			select {
			case <-r.end:
				return // the lock was released meanwhile, and renew may have failed for that
			default:
			}
			if err != nil {
				close(r.lost)
				return
			}
		}
	}()
	return r
}

// Lost implements Held.
func (r Renewing) Lost() <-chan struct{} { return r.lost }

// End ends the renewals.
func (r Renewing) End() { close(r.end) }

// foreign is a strategy of another library, or nil.
func (o *options) foreign() *Strategy {
	if more := o.more(); more != nil && more.Client != nil {
		return more
	}
	return nil
}

// endless is longer than a run.
const endless = 24 * time.Hour

// callForeign is one caller of another library. It does what all libraries can do: it locks
// a key, uses the resource, and unlocks.
func (w *client) callForeign(r *rand.Rand) {
	for !w.drained.Load() {
		if !w.turnForeign(rand.New(rand.NewPCG(r.Uint64(), 0))) {
			time.Sleep(w.Term/20 + rand.N(w.Term/3))
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
	}
}

func (w *client) turnForeign(r *rand.Rand) (had bool) {
	key := r.IntN(keys)
	length := time.Duration(r.IntN(20)) * time.Millisecond
	if r.IntN(10) == 0 {
		length = time.Duration((0.5 + 1.5*r.Float64()) * float64(w.Term))
	}
	patience := 20 * w.Term
	if r.IntN(6) == 0 {
		patience = time.Duration(r.Float64() * 2 * float64(w.Term))
	}

	id := w.ids.Add(1)
	w.report(report{What: asks, ID: id, Key: key, T: hostclock.Now()})
	// The context must not end while the lock is held: hasp's lease would end with it.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	late := time.AfterFunc(patience, cancel)
	h, err := w.locker.Lock(ctx, w.Keys[key])
	late.Stop()
	t := hostclock.Now()
	if err != nil {
		w.report(report{What: failed, ID: id, T: t, Err: "no lock"})
		return false
	}

	planned := t + int64(length)
	w.report(report{What: got, ID: id, T: t, Plan: planned, Expires: trusted(h)})
	var lost atomic.Int64
	lost.Store(t + int64(endless))
	over := make(chan struct{})
	go func() {
		select {
		case <-h.Lost():
			lost.Store(hostclock.Now())
		case <-over:
		}
	}()
	for now := t; now < planned && now < lost.Load() && now < trusted(h); now = hostclock.Now() {
		w.useForeign(id)
		time.Sleep(time.Duration(3+r.IntN(10)) * time.Millisecond)
	}

	end := min(hostclock.Now(), lost.Load(), trusted(h))
	close(over)
	w.report(report{What: ended, ID: id, T: hostclock.Now(), End: end, Expires: end, Lost: lost.Load() < t+int64(endless)})
	ctx, stop := context.WithTimeout(context.Background(), 3*time.Second)
	defer stop()
	done := report{What: freed, ID: id}
	if h.Unlock(ctx) != nil {
		done.Err = "error"
	}
	done.T = hostclock.Now()
	w.report(done)
	return true
}

// trusted returns until when a program may trust a lock, by hostclock.
func trusted(h Held) int64 {
	for {
		t := hostclock.Now()
		left := endless
		if until := h.Until(); !until.IsZero() {
			left = time.Until(until)
		}
		if hostclock.Now()-t < int64(time.Millisecond) { // as in expires
			return t + int64(left)
		}
	}
}

// useForeign uses the resource without a fence.
func (w *client) useForeign(id int64) {
	w.using.Lock()
	defer w.using.Unlock()
	w.report(report{What: touch, ID: id, T: hostclock.Now()})
	<-w.touched
}

// openForeign opens a Locker. It tries again and again, because the store may be in the
// middle of a fault.
func (w *client) openForeign(s *Strategy) (err error) {
	until(time.Minute, 20*time.Millisecond, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		w.locker, err = s.Client(ctx, strings.Split(w.URL, ","), w.Term)
		return err == nil
	})
	return err
}

// OpenHasp opens a Locker of hasp, which has the same callers as those of other libraries.
func OpenHasp(ctx context.Context, url string, term time.Duration) (Locker, error) {
	c, err := hasp.Open(ctx, url, &hasp.Options{TTL: term, Timeout: term / 2})
	if err != nil {
		return nil, err
	}
	return haspLocker{c}, nil
}

type haspLocker struct{ *hasp.Client }

type haspHeld struct{ *hasp.Lease }

func (l haspLocker) Lock(ctx context.Context, key string) (Held, error) {
	lease, err := l.Client.Lock(ctx, key)
	if err != nil {
		return nil, err
	}
	return haspHeld{lease}, nil
}

func (h haspHeld) Lost() <-chan struct{} { return h.Context().Done() }

func (h haspHeld) Until() time.Time { return h.Expires() }
