package caslock

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/caslock/internal/parallel"
)

// sweeper removes what dead processes have left, and records of free keys. Each sweep runs on a
// goroutine of its own, so no release waits for its many calls.
type sweeper struct {
	records  *records
	tasks    *tasks
	off      bool         // the store does not compare versions when it deletes
	releases atomic.Int64 // the number of releases so far, plus a random number
	running  atomic.Bool  // a sweep runs
	position string       // where the next page begins; only the sweep that runs uses it
}

// newSweeper returns a sweeper whose first sweep is after a random number of releases, because most
// processes may end before their hundredth release.
func newSweeper(rs *records, ts *tasks, off bool) *sweeper {
	s := &sweeper{records: rs, tasks: ts, off: off}
	s.releases.Store(rand.Int64N(sweepEvery))
	return s
}

const (
	sweepEvery  = 100 // releases
	sweepPage   = 200 // entries of a page: more than sweepEvery releases leave, so sweeps catch up
	sweepWrites = 16  // how many writes a sweep makes at the same time
)

// noteRelease begins a sweep after each hundredth release.
func (s *sweeper) noteRelease() {
	if s.releases.Add(1)%sweepEvery == 0 {
		s.start()
	}
}

// start begins a sweep, unless one is running.
func (s *sweeper) start() {
	if s.off || s.running.Swap(true) {
		return
	}

	// If Close has begun, no sweep starts, now or later, so running may stay true.
	_ = s.tasks.run(context.Background(), func(ctx context.Context) {
		defer s.running.Store(false)
		_ = s.sweep(ctx) // after an error, the next sweep begins with the first page
	})
}

// sweep reads one page of records. It removes dead items: those that this driver has seen unchanged
// for their whole term. It also removes records that have had no items for a while. If a write
// fails, or is refused because another driver has written the record, a later sweep does it.
func (s *sweeper) sweep(ctx context.Context) error {
	// A page that takes longer is given up, and the next sweep begins again.
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	// After an error, begin again with the first page, because the store may have forgotten the
	// position.
	position := s.position
	s.position = ""
	views, next, err := s.records.page(ctx, "", position, sweepPage)
	if err != nil {
		return err
	}
	s.position = next

	now := time.Now()
	parallel.Each(len(views), sweepWrites, func(i int) {
		v := views[i]
		live := v.live(now)
		switch {
		case len(live) < len(v.rec.Items): // some items are dead
			_ = s.records.put(ctx, v, v.next(live, now))
		case v.isOver(now):
			_ = s.records.remove(ctx, v)
		}
	})
	return nil
}
