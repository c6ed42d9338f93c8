package caslock

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/caslock/internal/parallel"
)

// sweeper removes what dead processes have left, and records of free keys. It has a goroutine of
// its own, so no release waits for its many calls.
type sweeper struct {
	records  *records
	tasks    *tasks
	off      bool // the store does not compare versions when it deletes
	running  atomic.Bool
	position string // where the next page begins; belongs to the goroutine
}

const (
	sweepPage   = 200 // entries of a page, which is more than 100 releases can leave
	sweepWrites = 16  // how many writes a sweep makes at the same time
)

// start begins a sweep, unless one is running. It goes on while a page has much to remove, so it
// catches up with many releases.
func (s *sweeper) start() {
	if s.off || s.running.Swap(true) {
		return
	}

	_ = s.tasks.run(context.Background(), func(ctx context.Context) {
		defer s.running.Store(false)
		for {
			if n, err := s.sweep(ctx); err != nil || n < sweepPage/2 {
				return
			}
		}
	})
}

// sweep reads one page of records, and returns how many it has tried to remove or to write. It
// removes dead items: those that this driver has seen unchanged for their whole term. It also
// removes records that have had no items for a while.
func (s *sweeper) sweep(ctx context.Context) (n int, err error) {
	// A page that takes longer is given up, and the next sweep begins again.
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	// After an error, "" stays, because the store may have forgotten the position.
	position := s.position
	s.position = ""
	views, next, err := s.records.page(ctx, "", position, sweepPage)
	if err != nil {
		return 0, err
	}
	s.position = next

	now := time.Now()
	var tries atomic.Int64
	parallel.Each(len(views), sweepWrites, func(i int) {
		v := views[i]
		live := v.live(now)
		switch {
		case len(live) < len(v.rec.Items):
			_ = s.records.put(ctx, v, v.next(live, now))
		case v.isOver(now):
			_ = s.records.remove(ctx, v)
		default:
			return
		}
		tries.Add(1) // if this one has failed, a later sweep does it
	})
	return int(tries.Load()), nil
}
