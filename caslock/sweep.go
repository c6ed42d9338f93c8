package caslock

import (
	"context"
	"sync/atomic"
	"time"
)

// sweeper removes what dead processes have left, one page of records at a time.
type sweeper struct {
	records  *records
	position atomic.Value // a string: where the next page begins
}

// sweep reads one page of records. It removes dead items: those that this driver has seen unchanged
// for their whole term. It also removes records that have had no items for an hour. The number of a
// new record comes from the clock, so it is larger than the old number.
func (s *sweeper) sweep(ctx context.Context) error {
	// After an error, "" stays, because the store may have forgotten the position.
	position, _ := s.position.Swap("").(string)
	views, next, err := s.records.page(ctx, "", position, 200, time.Minute)
	if err != nil {
		return err
	}
	s.position.Store(next)

	now := time.Now()
	anHourAgo := uint64(now.Add(-time.Hour).UnixMicro())
	for _, v := range views {
		live := v.live(now)
		switch {
		case len(live) < len(v.rec.Items):
			// If this fails, a later sweep does it.
			_ = s.records.put(ctx, v, v.next(live, now))
		case len(live) == 0 && v.rec.Write < anHourAgo:
			_ = s.records.remove(ctx, v)
		}
	}
	return nil
}
