package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// load is a stream of calls.
type load struct {
	all, answered atomic.Int64
	stop          func() // starts no more calls
	end           func() // waits until all calls have ended
}

func (l *load) unanswered() int64 { return l.all.Load() - l.answered.Load() }

// begin starts a call whenever the duration every has passed.
func begin(ctx context.Context, s *Store, every time.Duration) *load {
	l := &load{}
	starting, stop := context.WithCancel(ctx)
	var calls sync.WaitGroup
	calls.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for starting.Err() == nil {
			<-tick.C
			n := l.all.Add(1)
			calls.Go(func() {
				if _, err := s.Do(ctx, "incr", fmt.Sprint("load", n)); err == nil {
					l.answered.Add(1)
				}
			})
		}
	})
	l.stop, l.end = stop, func() { stop(); calls.Wait() }
	return l
}

// few is how many calls an outage may end, of the hundreds that are made during the outage. Without
// the mechanism that is tested, these are most calls.
const few = 45

// All connections die without an error, as if a firewall had forgotten them. The calls without an
// answer are those that were sent before the silence was noticed.
func TestConnectionsThatDieInSilenceEndFewCalls(t *testing.T) {
	t.Parallel()
	for _, byURL := range []bool{true, false} {
		t.Run(fmt.Sprint("url=", byURL), func(t *testing.T) {
			t.Parallel()
			p := redistest.Start(t, redistest.Own).Proxy()
			s := through(t, p.Addr(), byURL)
			ctx, cancel := context.WithTimeout(t.Context(), hour)
			defer cancel()
			pings(t, s)
			p.StallRequests()
			busy := begin(ctx, s, time.Millisecond)
			until(t, "a connection for each flight", func() bool { return allFlights(s) })
			p.Flow()
			busy.end()
			pings(t, s) // how long this takes says when a call is late

			p.Forget()
			l := begin(ctx, s, 2*time.Millisecond)
			until(t, "a new connection", func() bool { return l.answered.Load() > 500 })
			l.stop()
			until(t, "few unanswered calls", func() bool { return l.unanswered() <= few })
			cancel()
			l.end()
		})
	}
}

// A master hangs. hasp asks the sentinels although no call has failed yet, and sends the calls that
// the old master has not received to the new one.
func TestAMasterThatHangsEndsFewCalls(t *testing.T) {
	t.Parallel()
	for _, replicas := range []string{"0", "1"} {
		t.Run("replicas="+replicas, func(t *testing.T) {
			t.Parallel()
			set := redistest.StartSentinel(t, nil)
			s := opened(t, set.URL(), map[string]string{"replicas": replicas})
			s.opened.sentinels.timer.Stop() // otherwise hasp would notice after 10 seconds
			ctx := await.Timeout(t, hour)
			l := begin(ctx, s, 5*time.Millisecond)
			until(t, "answers", func() bool { return l.answered.Load() > 50 })
			old := set.Master()
			old.Pause()
			set.Failover()
			before := l.answered.Load()
			until(t, "the new master", func() bool { return l.answered.Load() > before+300 })
			l.end()
			if n := l.unanswered(); n > few {
				t.Errorf("%d of %d calls failed", n, l.all.Load())
			}
			old.Resume()
		})
	}
}

// A server takes no more connections. Then all calls use the connection that exists.
func TestAFullServerEndsNoCall(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Real)
	s := opened(t, srv.URL(), nil)
	await.Must(t, srv.Client().ConfigSet(t.Context(), "maxclients", "1").Err())
	if err := errFull; !resp.IsUnsent(err) {
		t.Errorf("%v: want that the call counts as not sent", err)
	}
	var calls sync.WaitGroup
	for _, key := range numbered("full", 50) {
		calls.Go(func() {
			for range 400 {
				if _, err := s.Do(t.Context(), "incr", key); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	calls.Wait()
}

// After a failover behind one address, the connections lead to a replica. No call and no renewal
// fails.
func TestAFailoverBehindOneAddressEndsNoCall(t *testing.T) {
	t.Parallel()
	keys := numbered("renew", 60)
	for _, byURL := range []bool{true, false} {
		for name, once := range map[string]func(ctx context.Context, s *Store) []Reply{
			"batch": func(ctx context.Context, s *Store) []Reply {
				return each(ctx, s, counting, keys...)
			},
			"calls": func(ctx context.Context, s *Store) (replies []Reply) {
				for _, key := range keys {
					replies = append(replies, reply(s.Run(ctx, counting, on(key))))
				}
				return replies
			},
		} {
			t.Run(fmt.Sprintf("url=%v, %s", byURL, name), func(t *testing.T) {
				t.Parallel()
				old := redistest.Start(t, redistest.Real)
				next := redistest.Start(t, redistest.Real)
				var to atomic.Value
				to.Store(old.Addr)
				p := await.Value(faultproxy.Listen(func() (net.Conn, error) {
					return net.Dial("tcp", to.Load().(string))
				}))
				t.Cleanup(p.Close)
				s := through(t, p.Addr(), byURL)
				succeeds := func() {
					for i, r := range once(t.Context(), s) {
						if r.Err != nil {
							t.Errorf("%s: %v", keys[i], r.Err)
						}
					}
				}
				succeeds()
				var warm sync.WaitGroup
				for range 20 { // many connections
					warm.Go(succeeds)
					warm.Go(func() {
						pipe := s.rdb.Pipeline()
						pipe.BLPop(t.Context(), 300*time.Millisecond, "nothing")
						_, _ = pipe.Exec(t.Context())
					})
				}
				warm.Wait()

				to.Store(next.Addr)
				host, port, _ := strings.Cut(next.Addr, ":")
				await.Must(t, old.Client().ReplicaOf(t.Context(), host, port).Err())
				for range 3 {
					succeeds()
				}
			})
		}
	}
}

// Sentinels may name one master by several addresses, and answer in any order. The connections
// stay.
func TestAMasterWithTwoNamesKeepsItsConnections(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Real)
	_, port, _ := strings.Cut(srv.Addr, ":")
	one, two := srv.Proxy(), srv.Proxy()
	claims(one, 1, "127.0.0.1:"+port)
	claims(two, 1, "localhost:"+port)
	s := opened(t, "redis-sentinel://"+one.Addr()+","+two.Addr()+"/m", nil)
	pings(t, s)
	_, era, err := s.opened.sentinels.find(t.Context())
	await.Must(t, err)
	for _, first := range []*faultproxy.Proxy{one, two, one, two} {
		one.Delay(50 * time.Millisecond)
		two.Delay(50 * time.Millisecond)
		first.Delay(0)
		if _, _, err := s.opened.sentinels.find(t.Context()); err != nil || era.Err() != nil {
			t.Fatalf("the connections were closed (%v)", err)
		}
	}
	pings(t, s)
}

// In an outage, many calls fail, and hasp asks the sentinels rarely.
func TestFewSearchesInAnOutage(t *testing.T) {
	t.Parallel()
	sentinel := redistest.Start(t, redistest.Own).Proxy()
	claims(sentinel, 1, deadPort)
	s, _ := prepared(t, "redis-sentinel://"+sentinel.Addr()+"/m")
	sentinel.Commands()
	began := time.Now()
	for range 300 {
		if _, err := s.Do(t.Context(), "get", "k"); err == nil || errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	}
	asked, took := len(sentinel.Commands())/2, time.Since(began)
	if most := 3 + int(took/pause); asked > most {
		t.Errorf("%d searches in %v, want %d at most", asked, took, most)
	}
}
