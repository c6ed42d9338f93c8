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

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// byURLAndByClient runs f with a Store that has a URL, and with one that has a client of the caller.
// Both use the proxy p.
func byURLAndByClient(t *testing.T, o *redistest.Options, f func(t *testing.T, s *Store, p *faultproxy.Proxy, srv *redistest.Server)) {
	for _, byURL := range []bool{true, false} {
		t.Run(fmt.Sprint("url=", byURL), func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, o)
			p := srv.Proxy()
			f(t, through(t, p, byURL), p, srv)
		})
	}
}

func through(t *testing.T, p *faultproxy.Proxy, byURL bool) *Store {
	if byURL {
		return opened(t, "redis://"+p.Addr(), nil)
	}
	rdb := redis.NewClient(&redis.Options{Addr: p.Addr(), ReadTimeout: hour}) // so a dead connection keeps its flight
	t.Cleanup(func() { rdb.Close() })
	return New(rdb)
}

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

// few is how many calls an outage may end, of the hundreds that are made during the outage. Without the
// mechanism that is tested, these are most calls.
const few = 45

// All connections die without an error, as if a firewall had forgotten them. The calls without an
// answer are those that were sent before the silence was noticed.
func TestConnectionsThatDieInSilenceEndFewCalls(t *testing.T) {
	t.Parallel()
	byURLAndByClient(t, &redistest.Options{Own: true}, func(t *testing.T, s *Store, p *faultproxy.Proxy, _ *redistest.Server) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		pings(t, s)
		p.StallRequests()
		busy := begin(ctx, s, time.Millisecond)
		until(t, "a connection for each flight", func() bool { return len(flights(s)) == mostFlights })
		p.Flow()
		busy.end()
		pings(t, s) // how long this takes says when a call is late

		p.Forget()
		l := begin(ctx, s, 2*time.Millisecond)
		until(t, "a new connection", func() bool { return l.answered.Load() > 500 })
		l.stop()
		until(t, "few unanswered calls", func() bool { return l.unanswered() <= few })
		t.Logf("%d of %d calls without an answer", l.unanswered(), l.all.Load())
		cancel()
		l.end()
	})
}

func flights(s *Store) []*flight {
	s.one.calls.mu.Lock()
	defer s.one.calls.mu.Unlock()
	return append([]*flight(nil), s.one.calls.flights...)
}

// A master hangs. hasp asks the sentinels although no call has failed yet, and sends the calls that the old
// master has not received to the new one.
func TestAMasterThatHangsEndsFewCalls(t *testing.T) {
	t.Parallel()
	for _, replicas := range []string{"0", "1"} {
		t.Run("replicas="+replicas, func(t *testing.T) {
			t.Parallel()
			set := redistest.StartSentinel(t, nil)
			s := opened(t, set.URL(), map[string]string{"replicas": replicas})
			s.opened.sentinels.timer.Stop() // otherwise hasp would notice after 10 seconds
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
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
			t.Logf("%d of %d calls failed", l.unanswered(), l.all.Load())
			old.Resume()
		})
	}
}

// A server takes no more connections. Then all calls use the connection that exists.
func TestAFullServerEndsNoCall(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Real: true})
	s := opened(t, srv.URL(), nil)
	pings(t, s)
	await.Must(t, srv.Client().ConfigSet(t.Context(), "maxclients", "1").Err())
	var calls sync.WaitGroup
	for i := range 50 {
		calls.Go(func() {
			for range 400 {
				if _, err := s.Do(t.Context(), "incr", fmt.Sprint("full", i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	calls.Wait()
}

// After a failover behind one address, the connections lead to a replica. No call and no renewal fails.
func TestAFailoverBehindOneAddressEndsNoCall(t *testing.T) {
	t.Parallel()
	for _, byURL := range []bool{true, false} {
		for _, batch := range []bool{true, false} {
			t.Run(fmt.Sprintf("url=%v, batch=%v", byURL, batch), func(t *testing.T) {
				t.Parallel()
				old, next := redistest.Start(t, &redistest.Options{Real: true}), redistest.Start(t, &redistest.Options{Real: true})
				var to atomic.Value
				to.Store(old.Addr)
				p := await.Value(faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", to.Load().(string)) }))
				t.Cleanup(p.Close)
				s := through(t, p, byURL)
				calls := make([]Call, 60)
				for i := range calls {
					calls[i] = Call{[]string{fmt.Sprint("renew", i)}, []string{"1"}}
				}
				once := func() {
					if !batch {
						for _, c := range calls {
							if _, err := s.Run(t.Context(), counting, c); err != nil {
								t.Error(err)
							}
						}
						return
					}
					s.RunEach(t.Context(), counting, calls, func(i int, v any, err error) {
						if err != nil {
							t.Errorf("renewal %d: %v", i, err)
						}
					})
				}
				once()
				var warm sync.WaitGroup
				for range 20 { // many connections
					warm.Go(once)
				}
				warm.Wait()
				to.Store(next.Addr)
				host, port, _ := strings.Cut(next.Addr, ":")
				await.Must(t, old.Client().ReplicaOf(t.Context(), host, port).Err())
				for range 3 {
					once()
				}
			})
		}
	}
}

// claims makes a proxy in front of any server act as a sentinel that names the master host:port.
func claims(p *faultproxy.Proxy, host, port string) {
	p.Forgive()
	p.Answer("sentinel master", fmt.Sprintf("*8\r\n+config-epoch\r\n+1\r\n+ip\r\n+%s\r\n+port\r\n+%s\r\n+runid\r\n+run1\r\n", host, port))
	p.Answer("sentinel get-master-addr", fmt.Sprintf("*2\r\n+%s\r\n+%s\r\n", host, port))
}

// Sentinels may name one master by several addresses, and answer in any order. The connections stay.
func TestAMasterWithTwoNamesKeepsItsConnections(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Real: true})
	_, port, _ := strings.Cut(srv.Addr, ":")
	one, two := srv.Proxy(), srv.Proxy()
	claims(one, "127.0.0.1", port)
	claims(two, "localhost", port)
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
	sentinel := redistest.Start(t, &redistest.Options{Own: true}).Proxy()
	host, port, _ := strings.Cut(deadPort, ":")
	claims(sentinel, host, port)
	s, _ := prepared(t, "redis-sentinel://"+sentinel.Addr()+"/m", nil, 0)
	sentinel.Commands()
	began := time.Now()
	for range 300 {
		if _, err := s.Do(t.Context(), "get", "k"); err == nil || errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	}
	asked, took := len(sentinel.Commands())/2, time.Since(began)
	t.Logf("%d searches in %v", asked, took)
	if most := 3 + int(took/pause); asked > most {
		t.Errorf("%d searches in %v, want %d at most", asked, took, most)
	}
}
