package fairlock_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/strategytest"
)

// Callers give up while others keep their places. Their entries do not pile up, the order stays,
// and nothing is left in the end.
func TestGivenUpPlacesLeaveNoEntries(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(3)
		var stay []*wait
		var owners []string
		for i := range 40 {
			if i%10 == 0 {
				stay = append(stay, ps[1].wait(fence))
				owners = append(owners, stay[len(stay)-1].c.Owner)
			}
			x := ps[2].wait()
			x.stop()
			w.settle()
			if n := w.rdb.LLen(w.Context(), queueKey).Val(); n > 2*int64(len(stay)) {
				w.Errorf("%d entries of %d waiters", n, len(stay))
			}
		}
		w.queued(owners...)
		stay[1].stop()
		w.settle()
		ps[0].release(holder)
		for _, x := range slices.Delete(stay, 1, 2) {
			x.servedAtOnce()
		}
		w.empty("all were served")
	})
}

// Two processes are stopped, and look alive. A release hands the key to one of them even after its
// window, if no poll has ended its place since. That costs the others one window, once.
func TestStoppedWaiterWhoseWindowHasPassed(t *testing.T) {
	const polled = window / 6
	const ends = polled + window // between two polls of the other process
	given := 0
	for late := polled; late < 2*window; late += window / 12 {
		inWorld(t, func(w *world) {
			holder, ps := w.procs(2)
			sub := w.rdb.Subscribe(w.Context(), "stopped")
			defer sub.Close()
			want(w.T, "subscribe", errOf(sub.Receive(w.Context())), nil)
			sub.Channel() // the connection is read
			for _, token := range []string{"one", "two"} {
				w.place(token, fmt.Sprintf("PUBLISH stopped 1 %d 0 owner", window.Milliseconds()), ends)
			}
			x := ps[1].wait()
			time.Sleep(late)
			ps[0].release(holder)
			if recordOf(w.T, w.rdb, "k").token == "one" && late > ends {
				given++
			}
			most := window + 10*time.Millisecond
			if late > ends+window/3 {
				most = 0
			}
			x.gotWithin(time.Now(), most)
		})
	}
	if given == 0 {
		t.Error("no release was between the end of the window and the next poll")
	}
}

// place puts an entry into the queue of "k", whose place ends after that time.
func (w *world) place(token, entry string, ends time.Duration) {
	w.rdb.RPush(w.Context(), queueKey, token+" "+entry)
	w.rdb.ZAdd(w.Context(), timeoutsKey, redis.Z{Score: float64(time.Now().Add(ends).UnixMilli()), Member: token})
}

// Redis evicts a part of the queue, and a waiter queues before the next poll. From that poll on
// the keys have an end again, and all are served. So they are if the release comes before.
func TestEvictionOfAPartOfTheQueue(t *testing.T) {
	for _, gone := range []string{queueKey, timeoutsKey} {
		for _, polled := range []bool{false, true} {
			inWorld(t, func(w *world) {
				holder, ps := w.procs(2)
				x := ps[1].wait()
				w.v.Mini.Del(gone)
				y := ps[1].wait()
				if polled {
					time.Sleep(window / 3)
					for _, key := range []string{queueKey, timeoutsKey} {
						if left := w.v.Mini.TTL(key); left <= 0 || left > window {
							w.Errorf("without %s: %s ends in %v", gone, key, left)
						}
					}
				}
				ps[0].release(holder)
				released := time.Now()
				var all sync.WaitGroup
				for _, x := range []*wait{x, y} {
					all.Go(func() { <-x.done; x.release() })
				}
				all.Wait()
				if took := time.Since(released); took > window {
					w.Errorf("without %s: served after %v", gone, took)
				}
				w.empty("both were served")
			})
		}
	}
}

// A message tells the first waiter with a subscription the new end. Waiters without one are passed
// over. Waiters that leave before or after that do not keep the next one from the key, although
// their client still has its subscription.
func TestWaitersLeaveAroundAReleaseThatKeepsTheKey(t *testing.T) {
	const keep = window / 10 // the next poll is later
	// The last ones leave when the key is free, just before their client polls.
	for _, after := range []time.Duration{0, keep / 2, keep + 500*time.Microsecond} {
		t.Run(after.String(), func(t *testing.T) {
			inWorld(t, func(w *world) {
				holder, ps := w.procs(3)
				w.place("dead", "PUBLISH hasp:grant:dead 1 60000 0 a dead one", time.Hour)
				var leave, stay []*wait
				for range 40 {
					leave = append(leave, ps[1].wait())
				}
				for range 41 { // so many that the entries of the others remain
					stay = append(stay, ps[2].wait())
				}
				kept := strategytest.Kept(holder, keep)
				time.AfterFunc(after, func() {
					for _, x := range leave {
						x.stop()
					}
				})
				time.Sleep(keep / 4)
				ps[0].release(kept)
				if got := recordOf(w.T, w.rdb, "k"); got.token != "kept-"+holder.Token || got.owner != holder.Owner || got.mark != "+" {
					w.Errorf("the record is %+v", got)
				}
				stay[0].gotWithin(kept.KeepUntil, 10*time.Millisecond)
			})
		})
	}
}

// An enqueue was not answered, so the driver repeats the release of its token. The release
// was lost, so the repeat is the first to arrive. It keeps the key as the release would.
func TestRepeatOfAReleaseThatKeepsTheKey(t *testing.T) {
	inWorld(t, func(w *world) {
		holder, ps := w.procs(2)
		x := ps[1].wait(ps[1].failing(faultproxy.LoseReply))
		ps[0].release(holder)
		x.got()

		ps[1].proxy.Fail(x.c.Token, faultproxy.LoseRequest)
		kept := strategytest.Kept(x.c, 20*time.Second)
		end := kept.KeepUntil
		if err := ps[1].Release(w.Context(), kept); err == nil || errors.Is(err, backend.ErrLost) {
			w.Fatalf("release: %v, want an unknown outcome", err)
		}
		time.Sleep(x.c.Timeout + time.Second)
		w.settle()
		if got := recordOf(w.T, w.rdb, "k"); got.token != "kept-"+x.c.Token {
			w.Errorf("the record is %+v", got)
		}
		y := ps[0].wait()
		y.got()
		if late := y.at.Sub(end); late < 0 || late > time.Second {
			w.Errorf("the next waiter got the key %v after the end of the keep", late)
		}
	})
}
