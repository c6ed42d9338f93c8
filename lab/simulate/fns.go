package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp"
)

type (
	leadFn = func(context.Context, *hasp.Lease) error
	allFn  = func(context.Context, *hasp.Leases) error

	leadFunc  = func(context.Context, hasp.Locker, string, leadFn, ...hasp.Option) error
	doAllFunc = func(context.Context, hasp.Locker, []string, allFn, ...hasp.Option) error
)

// calls contains functions of package hasp that tests replace by broken functions.
type calls struct {
	lead  leadFunc
	doAll doAllFunc
	apart func() hasp.Option
}

// sound contains the real functions of package hasp.
var sound = calls{lead: hasp.Lead, doAll: hasp.DoAll, apart: hasp.WithoutReentry}

// tracked is the Locker of one Lead or DoAll. It stores the leases that its method Lock returns.
type tracked struct {
	*client
	began map[*hasp.Lease]time.Time // when the Lock of each lease began
	// when the fn of a Lead returned after the loss of its lease; zero after the next Lock
	lost time.Time
}

func track(c *client) *tracked { return &tracked{client: c, began: map[*hasp.Lease]time.Time{}} }

func (t *tracked) Lock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	began := time.Now()
	if d := began.Sub(t.lost); !t.lost.IsZero() && d > leadPause {
		t.w.errorf("Lead by %s competed again %v after a loss", t.name, d)
	}
	t.lost = time.Time{}
	l, err := t.client.Lock(ctx, key, opts...)
	if err == nil {
		t.began[l] = began
	}

	return l, err
}

// leadPause is the longest pause of Lead after a loss.
const leadPause = 100 * time.Millisecond

// checkEnded reports a lease that is still trusted, although the Lead or DoAll has returned.
func (t *tracked) checkEnded(what string) {
	for l := range t.began {
		if l.Err() == nil {
			t.w.errorf("%s by %s has returned, and a lease of %s is trusted", what, t.name,
				l.Key())
		}
	}
}

// errFn is the error that an fn returns, and panicFn is the value with which an fn panics.
var errFn = errors.New("fn")

const panicFn = "fn"

// recovered is deferred around a call whose fn may panic with panicFn.
func recovered() {
	if p := recover(); p != nil && p != panicFn {
		panic(p)
	}
}

// checkContext reports the context of an fn if it has not ended, although a lease of the fn or the
// outer context of the call has ended.
func (a *caller) checkContext(what string, ctx, outer context.Context, held func() error) {
	if held() == nil && outer.Err() == nil || ctx.Err() != nil {
		return
	}
	time.Sleep(time.Nanosecond) // the context may be about to end at this very instant
	if ctx.Err() == nil {
		a.errorf("the context of the fn of %s by %s goes on: %v, %v", what, a.c.name, held(),
			outer.Err())
	}
}

// inside acts as most fns do: it waits, and meanwhile checks the context and the book.
func (a *caller) inside(what string, ctx, outer context.Context, held func() error) {
	for range 1 + a.r.IntN(4) {
		a.checkContext(what, ctx, outer, held)
		a.checkAll()
		if a.chance(3) {
			a.nap(20 * time.Millisecond)
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(a.upTo(200 * time.Millisecond)):
		}
	}

	if a.chance(3) {
		a.nap(500 * time.Millisecond) // fn cleans up, or does not notice the end of its context
		a.checkAll()
	}
}

// outcome describes how an fn has returned. It is zero until the fn returns.
type outcome struct {
	at   time.Time
	err  error
	lost bool // a lease had ended with ErrLost
	over bool // the context of the call had ended
}

func (o outcome) String() string {
	return fmt.Sprintf("returned %v at %v, its lease lost: %v, its context over: %v", o.err,
		o.at.Format("05.000"), o.lost, o.over)
}

// end draws how an fn ends: it panics, or it unlocks, fails or returns nil. It stores in o how the fn
// has returned. The function held returns why a lease has ended.
func (a *caller) end(
	o *outcome, outer context.Context, held func() error, unlock func(context.Context) error,
) (err error) {
	switch a.r.IntN(8) {
	case 0:
		panic(panicFn)
	case 1:
		_ = unlock(context.Background())
	case 2, 3:
		err = errFn
	}
	*o = outcome{at: time.Now(), err: err, lost: errors.Is(held(), hasp.ErrLost),
		over: outer.Err() != nil}
	return err
}

// maxRuns is how many times the fn of a Lead runs before its caller gives up.
const maxRuns = 5

// lead calls Lead with an fn that may fail, panic or unlock.
func (a *caller) lead() {
	b := a.bounds()
	defer b.cancel()
	if a.chance(10) {
		a.share(&b)
	}
	t := track(a.c)
	var last outcome
	runs := 0
	running := false
	defer recovered()
	defer t.checkEnded("Lead")
	err := a.calls.lead(b.ctx, t, a.key(), func(ctx context.Context, l *hasp.Lease) error {
		if running {
			a.errorf("the fn of Lead by %s runs twice at once", a.c.name)
		}
		running = true
		last = outcome{}
		defer func() { running = false }()
		n := a.took(l, 0, t.began[l])
		if runs++; runs == maxRuns || a.chance(6) {
			b.cancel()
			b.end = time.Now()
		}
		a.inside("Lead", ctx, b.ctx, l.Err)
		if a.chance(4) {
			if x := a.reenter(l, n, false); x != nil {
				a.unlock(ctx, x)
			}
		}

		if l.Err() == nil && a.chance(2) {
			a.nap(300 * time.Millisecond)
		}
		err := a.end(&last, b.ctx, l.Err, l.Unlock)
		if err == nil && last.lost && !last.over {
			t.lost = last.at
		}
		return err
	}, b.opts...)
	a.checkLead(b, runs, last, err)
}

// checkLead checks what a Lead returned after some runs of its fn.
func (a *caller) checkLead(b bounds, runs int, last outcome, err error) {
	if b.within || b.shared {
		if !errors.Is(err, hasp.ErrInvalid) || runs > 0 {
			a.errorf("Lead with WithMaxWait or WithShared: %v after %d runs", err, runs)
		}
		return
	}

	// If no fn held the key until the fn returned, only the end of the context or Close ends Lead.
	held := runs > 0 && !last.lost
	ended := b.ctx.Err() != nil || errors.Is(err, hasp.ErrClosed)
	lost := errors.Is(err, hasp.ErrLost)
	wrong := ""
	switch {
	case err == nil && (!held || last.err != nil):
		wrong = "returned nil"
	case !held && !ended:
		wrong = "ended"
	case runs > 0 && last.lost && last.over && !lost:
		wrong = "lost the key after the end of its context"
	case errors.Is(err, errFn) && last.lost && !lost:
		wrong = "returned the result of a term that was lost"
	case errors.Is(err, hasp.ErrInvalid), errors.Is(err, errors.ErrUnsupported),
		errors.Is(err, hasp.ErrReleased):
		wrong = "failed"
	}

	if wrong != "" {
		a.errorf("Lead by %s %s: %v after %d runs, the last of which %v", a.c.name, wrong, err, runs,
			last)
	}
	a.checkReturn("Lead", b, last, err)
}

// checkReturn reports a call that returned too late after the end of its wait and of its fn. After
// its fn has returned, a call may take as long as an Unlock.
func (a *caller) checkReturn(what string, b bounds, last outcome, err error) {
	due := a.due(b)
	if unlocked := last.at.Add(3*a.c.timeout + late); unlocked.After(due) {
		due = unlocked
	}
	if d := time.Since(due); d > 0 {
		a.errorf("%s by %s returned %v late: %v", what, a.c.name, d, err)
	}
}

// doAll calls DoAll with an fn that may fail, panic or unlock.
func (a *caller) doAll() {
	b := a.bounds()
	defer b.cancel()
	a.share(&b)
	keys := []string{a.key(), a.key(), a.key()}[:1+a.r.IntN(3)]
	if a.chance(4) {
		// Each key has one attempt, and one more Timeout passes if the Client's last release is
		// unanswered.
		b.try(a.c)
		b.end = b.end.Add(time.Duration(len(keys)) * a.c.timeout)
		b.opts = append(b.opts, hasp.WithMaxWait(0))
	}

	if b.within {
		b.end = b.end.Add(2 * a.c.timeout) // after the wait, DoAll still locks keys that are free
	}
	b.end = b.end.Add(2 * a.c.timeout) // if DoAll fails, it unlocks the leases that it has

	t := track(a.c)
	var l hasp.Locker = t
	direct := a.chance(2) // a Client asks for all keys at the same time
	if direct {
		l = a.c.Client
		b.ctx = context.WithValue(b.ctx, directKey{}, true)
		for _, key := range keys {
			defer a.wants(a.c.name, key)()
		}
	}

	var last outcome
	entered := false
	start := a.start(keys...)
	defer recovered()
	defer t.checkEnded("DoAll")
	err := a.calls.doAll(b.ctx, l, keys, func(ctx context.Context, ls *hasp.Leases) error {
		entered = true
		if direct {
			for _, l := range ls.All() {
				t.began[l] = start.at
				a.noteLease(a.c.name, l)
			}
		}
		a.got("LockAll", b, start, nil)
		var has []string
		for _, l := range ls.All() {
			has = append(has, l.Key())
			a.take(l, 0, group{t.began[l], b.shared})
		}
		if want := slices.Compact(slices.Sorted(slices.Values(keys))); !slices.Equal(has, want) {
			a.errorf("the fn of DoAll by %s runs with %q, want %q", a.c.name, has, want)
		}
		a.inside("DoAll", ctx, b.ctx, ls.Err)

		all := ls.All()
		return a.end(&last, b.ctx, ls.Err, all[a.r.IntN(len(all))].Unlock)
	}, b.opts...)

	if !entered {
		// ErrLost means that LockAll lost one key while it waited for the next key.
		if !errors.Is(err, hasp.ErrLost) && a.got("LockAll", b, start, err) {
			a.errorf("DoAll by %s returned nil, and fn has not run", a.c.name)
		}
		return
	}

	hidden := last.err != nil && !errors.Is(err, last.err)
	unseen := last.lost && !errors.Is(err, hasp.ErrLost)
	if hidden || unseen || errors.Is(err, hasp.ErrReleased) {
		a.errorf("DoAll by %s: %v after an fn that %v", a.c.name, err, last)
	}
	a.checkReturn("DoAll", b, last, err)
}

// withoutReentry holds a key, and asks for the key again with WithoutReentry.
func (a *caller) withoutReentry() {
	b := a.bounds()
	defer b.cancel()
	a.share(&b)
	key := a.key()
	start := a.start(key)
	l, err := a.c.Lock(b.ctx, key, b.opts...)
	if !a.got("lock", b, start, err) {
		return
	}
	a.take(l, 0, group{start.at, b.shared})

	if a.chance(2) {
		other := caller{World: a.World, c: a.c, r: rand.New(rand.NewPCG(a.r.Uint64(), 0))}
		var after sync.WaitGroup
		after.Go(func() { other.outlasts(l) })
		a.nap(200 * time.Millisecond)
		a.checkAll()
		a.unlock(b.ctx, l)
		after.Wait()
		return
	}

	// While l may be held, the call locks the key only if both leases are shared, or if l is lost.
	x, _, _ := a.apart(l.Context(), l, 200*time.Millisecond)
	a.unlock(b.ctx, l)
	if x == nil {
		return
	}
	if x.Context().Err() == nil {
		a.errorf("the context of a lease by WithoutReentry goes on after the end of the lease around it")
	}
	a.unlock(b.ctx, x)
}

// outlasts asks for the key of l in a context that outlasts l.
func (a *caller) outlasts(l *hasp.Lease) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(l.Context()))
	defer cancel()
	x, n, shared := a.apart(ctx, l, 2*time.Second)
	if x == nil {
		return
	}
	if a.chance(2) { // this Lock re-enters the new lease
		if y := a.reenter(x, n, shared); y != nil {
			defer a.unlock(ctx, y)
		}
	}
	a.nap(100 * time.Millisecond)
	if x.Context().Err() != nil && x.Err() == nil {
		a.errorf("the context of a lease by WithoutReentry ended before the lease: %v",
			context.Cause(x.Context()))
	}
	a.unlock(ctx, x)
}

// apart asks for the key of l with WithoutReentry, for less than the time most. It returns the lease
// and its group, or nil.
func (a *caller) apart(
	ctx context.Context, l *hasp.Lease, most time.Duration,
) (x *hasp.Lease, n int, shared bool) {
	opts := []hasp.Option{a.calls.apart(), hasp.WithTTL(a.term(300 * time.Millisecond))}
	if a.chance(3) {
		opts = append(opts, hasp.WithFence())
	}
	if shared = a.c.shares && a.chance(3); shared {
		opts = append(opts, hasp.WithShared())
	}
	wait := a.upTo(most)
	lock := a.c.Lock
	start := a.start(l.Key())
	b := bounds{end: start.at.Add(wait), within: true}
	if a.chance(3) {
		b.try(a.c)
		lock = a.c.TryLock
	} else {
		opts = append(opts, hasp.WithMaxWait(wait))
	}

	x, err := lock(ctx, l.Key(), opts...)
	if err != nil && ctx.Err() != nil {
		return nil, 0, false // the cause may be that l was lost
	}
	if !a.got("lock by WithoutReentry", b, start, err) {
		return nil, 0, false
	}
	return x, a.take(x, 0, group{start.at, shared}), shared
}
