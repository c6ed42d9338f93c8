package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/clock"
)

// run runs all callers until they have ended.
func (w *client) run() {
	var wg sync.WaitGroup
	for i := range callers {
		r := rand.New(rand.NewPCG(w.Seed, uint64(i)))
		wg.Go(func() { w.call(r) })
	}
	wg.Wait()
	w.report(report{What: idle})
}

// call acts as one caller. After an error it pauses, so that other callers go first.
func (w *client) call(r *rand.Rand) {
	for !w.drained.Load() {
		if !w.round(r) {
			time.Sleep(w.Term/20 + rand.N(w.Term/3))
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
	}
}

// round uses locks once, as a program does. The random numbers of a round do not depend on the
// results of earlier rounds.
func (w *client) round(r *rand.Rand) (had bool) {
	r = rand.New(rand.NewPCG(r.Uint64(), 0))
	switch x := r.IntN(60); {
	case x == 0 && len(w.Keys) > keys:
		return w.many(r)
	case x < 6:
		return w.turn(context.Background(), w.c, r, numbers(0, keys))
	case x < 10:
		return w.single(r)
	}
	return w.turn(context.Background(), w.c, r, hot(r))
}

// numbers returns the numbers of the keys from first on, and before end.
func numbers(first, end int) (all []int) {
	for k := first; k < end; k++ {
		all = append(all, k)
	}
	return all
}

// hot draws a key that all callers contend for.
func hot(r *rand.Rand) []int {
	if r.IntN(4) == 0 {
		return []int{slotted}
	}
	return []int{r.IntN(keys)}
}

// single opens a Client for one Lock, as "hasp run" does.
func (w *client) single(r *rand.Rand) (had bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := w.dial(ctx)
	if err != nil {
		return false
	}
	defer c.Close()
	return w.turn(context.Background(), c, r, hot(r))
}

// many locks hundreds of keys, by one LockAll, or by a Lock for each key at the same time.
func (w *client) many(r *rand.Rand) (had bool) {
	all := numbers(keys, len(w.Keys))
	if w.Steady || r.IntN(2) == 0 {
		return w.turn(context.Background(), w.c, r, all)
	}
	var wg sync.WaitGroup
	for _, k := range all {
		one := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() { w.turn(context.Background(), w.c, one, []int{k}) })
	}
	wg.Wait()
	return true
}

// hold is a lease of a turn.
type hold struct {
	id    int64
	lease *hasp.Lease
	lost  atomic.Int64  // when the lease's context ended
	over  chan struct{} // closed when the lease's context has ended
	stop  func() bool   // ends the wait for the end of the lease's context
}

// turn carries out one Lock, or one LockAll of several keys, and then acts as the holder.
func (w *client) turn(ctx context.Context, c *hasp.Client, r *rand.Rand, which []int) (had bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opts, ask := w.options(r, which[0])
	length := time.Duration(r.IntN(20)) * time.Millisecond
	if r.IntN(10) == 0 {
		length = time.Duration((0.5 + 1.5*r.Float64()) * float64(w.Term))
	}
	blind := r.IntN(3) == 0
	if r.IntN(10) == 0 {
		defer time.AfterFunc(time.Duration(r.Float64()*2*float64(w.Term)), cancel).Stop()
	}

	holds, planned := w.begin(ctx, c, which, opts, ask, length)
	if holds == nil {
		return false
	}

	last := holds[len(holds)-1] // if the context of any hold ends, the context of the hold last ends as well
	if which[0] == 0 && len(which) == 1 && r.IntN(8) == 0 {
		under := []int{1, slotted}[r.IntN(2)] // always in this order, to avoid a deadlock
		w.turn(last.lease.Context(), c, r, []int{under})
	}

	for clock.Now() < planned && last.lease.Err() == nil {
		w.use(last.id, last.lease)
		time.Sleep(time.Duration(3+r.IntN(10)) * time.Millisecond)
	}
	if blind {
		w.use(last.id, last.lease) // do not check whether the lease is still held
	}

	var wg sync.WaitGroup
	for _, h := range slices.Backward(holds) {
		w.end(h)
		wg.Go(func() { w.unlock(h) })
	}
	wg.Wait()
	return true
}

// begin sends a copy of the report ask for each key, locks the keys, and reports the holds. The
// caller plans to unlock them at the time planned. If Lock fails, begin returns no holds.
func (w *client) begin(ctx context.Context, c *hasp.Client, which []int, opts []hasp.Option, ask report, length time.Duration) (holds []*hold, planned int64) {
	ids := make([]int64, len(which))
	for i, k := range which {
		ids[i] = w.ids.Add(1)
		ask.ID, ask.Key, ask.T = ids[i], k, clock.Now()
		w.report(ask)
	}
	leases, err := w.lock(ctx, c, which, opts)
	t := clock.Now()
	if err != nil {
		for _, id := range ids {
			w.report(report{What: failed, ID: id, T: t, Err: err.Error()})
		}
		return nil, 0
	}

	planned = t + int64(length)
	for i, l := range leases {
		h := &hold{id: ids[i], lease: l, over: make(chan struct{})}
		h.lost.Store(1<<63 - 1)
		holds = append(holds, h)
		w.report(report{What: got, ID: h.id, T: t, Slot: l.Slot(), Fence: l.Fence(), Plan: planned, Expires: expires(l)})
		h.stop = context.AfterFunc(l.Context(), func() {
			h.lost.Store(clock.Now())
			close(h.over)
		})
	}
	return holds, planned
}

// options draws the options of a Lock, and returns them with the report of the call.
func (w *client) options(r *rand.Rand, key int) (opts []hasp.Option, ask report) {
	ask.What, ask.Key = asks, key
	if key == slotted {
		n := slots
		if w.Plant == oneTooMany {
			n++
		}
		opts = append(opts, hasp.WithSlots(n))
	}
	if ask.Fenced = r.Float64() >= w.Bare; ask.Fenced {
		opts = append(opts, hasp.WithFence())
	}
	if ask.Shared = r.IntN(3) == 0 && w.shares.Load() && key != slotted; ask.Shared {
		opts = append(opts, hasp.WithShared())
	}
	switch r.IntN(12) {
	case 0, 1:
		opts = append(opts, hasp.WithMaxWait(time.Duration(r.Float64()*2*float64(w.Term))))
	case 2, 3:
		opts = append(opts, hasp.WithMaxWait(time.Duration(1+r.IntN(30))*time.Millisecond))
	}
	if r.IntN(3) == 0 {
		opts = append(opts, hasp.WithTTL(time.Duration((0.7+r.Float64())*float64(w.Term))))
	}
	if r.IntN(20) == 0 && !ask.Shared {
		opts = append(opts, hasp.WithMinHold(time.Duration(r.Float64()*0.2*float64(w.Term))))
	}
	if r.IntN(4) == 0 {
		opts = append(opts, hasp.WithLinger())
	}
	return opts, ask
}

// lock locks one key by Lock, and several keys by LockAll. The leases are in the order of the keys.
func (w *client) lock(ctx context.Context, c *hasp.Client, which []int, opts []hasp.Option) ([]*hasp.Lease, error) {
	if len(which) == 1 {
		name := slottedName
		if which[0] != slotted {
			name = w.Keys[which[0]]
		}
		l, err := c.Lock(ctx, name, opts...)
		return []*hasp.Lease{l}, err
	}
	var names []string
	for _, k := range which {
		names = append(names, w.Keys[k])
	}
	all, err := hasp.LockAll(ctx, c, names, opts...)
	if err != nil {
		return nil, err
	}
	return all.All(), nil
}

// end reports the time until which a lease was trusted. It is called just before Unlock.
func (w *client) end(h *hold) {
	if !h.stop() {
		<-h.over
	}
	end := clock.Now()
	gone := errors.Is(h.lease.Err(), hasp.ErrLost)
	t, exp := clock.Now(), expires(h.lease)
	w.report(report{What: ended, ID: h.id, T: t, End: min(end, exp, h.lost.Load()), Expires: exp, Lost: gone})
}

// unlock unlocks a lease, and tries again after an outage.
func (w *client) unlock(h *hold) {
	done := report{What: freed, ID: h.id}
	var err error
	repeatUntil(3*time.Second, 10*time.Millisecond, func() bool {
		err = h.lease.Unlock(context.Background())
		done.T = clock.Now()
		return err == nil || errors.Is(err, hasp.ErrLost) || errors.Is(err, hasp.ErrReleased)
	})
	done.Expires, done.Lost = expires(h.lease), errors.Is(err, hasp.ErrLost)
	if err != nil {
		done.Err = err.Error()
	}
	w.report(done)
}

// expires returns the time of clock.Now until which a lease is trusted, or a time up to a
// millisecond earlier. expires reads both clocks again if the process was stopped between the two readings.
func expires(l *hasp.Lease) int64 {
	for {
		t := clock.Now()
		left := time.Until(l.Expires())
		if clock.Now()-t < int64(time.Millisecond) {
			return t + int64(left)
		}
	}
}

// use uses the resource, and waits until the resource has answered.
func (w *client) use(id int64, lease *hasp.Lease) {
	w.using.Lock()
	defer w.using.Unlock()
	w.report(report{What: touch, ID: id, Fence: lease.Fence(), Expires: expires(lease)})
	<-w.touched
}
