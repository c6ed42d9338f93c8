package redlock

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-multierror"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// trial is a set of nodes in virtual time, and a driver that reaches them through their proxies.
type trial struct {
	vs redistest.VirtualServers
	d  *driver
}

// try runs f with n nodes, all of which vote.
func try(t *testing.T, n int, o *Options, f func(t *testing.T, tr trial)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		vs := redistest.VirtualNodes(t, n)
		tr := trial{vs, drives(t, vs.Clients(), o)}
		for range 2 { // the connections that the first one makes have the second one ask again
			tr.warm(t, tr.d, aFenced("warm"))
		}
		f(t, tr)
	})
}

// longTerm is the max_ttl of drivers whose options are nil.
const longTerm = 2 * time.Minute

// drives returns a driver that the end of the test closes.
func drives(t *testing.T, clients []redis.UniversalClient, o *Options) *driver {
	if o == nil {
		o = &Options{MaxTTL: longTerm}
	}
	d := await.Value(NewDriver(clients, o)).(*driver)
	t.Cleanup(func() { d.Close() })
	return d
}

// direct returns another driver, which does not use the proxies.
func (tr trial) direct(t *testing.T, o *Options) *driver {
	var all redistest.VirtualServers = tr.vs
	clients := all.Clients()
	for i, v := range all {
		clients[i] = v.Direct()
	}
	return drives(t, clients, o)
}

var tokens atomic.Int64

// aClaim returns a claim with a term of 10 s and a timeout of 1 s.
func aClaim(key string) backend.Claim {
	return backend.Claim{Key: key, Token: fmt.Sprintf("token-%016d", tokens.Add(1)), Owner: "host/1/test", TTL: 10 * time.Second, Timeout: time.Second}
}

func aFenced(key string) backend.Claim {
	c := aClaim(key)
	c.Fenced = true
	return c
}

// tryOnce makes one attempt.
func tryOnce(t *testing.T, d *driver, c backend.Claim, number, lead int) (backend.Grant, error) {
	g, _, err := d.ct.attempt(t.Context(), c, number, lead, nil)
	return g, err
}

// acquire takes c.Key, or stops the test.
func (tr trial) acquire(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	if _, err := d.Acquire(t.Context(), c); err != nil {
		t.Fatalf("acquire: %v", err)
	}
}

// release frees c.Key, or fails the test.
func (tr trial) release(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	strategytest.Want(t, "release", d.Release(t.Context(), c), nil)
}

// warm takes c.Key and releases it on all nodes, so that d knows them.
func (tr trial) warm(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	tr.acquire(t, d, c)
	synctest.Wait()
	tr.release(t, d, c)
	synctest.Wait()
}

// renewOne renews one hold. It returns an error if no answer comes in time.
func renewOne(d *driver, c backend.Claim, within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	err := errors.New("not answered")
	d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
	return err
}

// holds returns a letter for each node: x if it has c's record, k if it has a record that was kept
// for c, ? if it has another value under the key, and - if the key is free.
func (tr trial) holds(c backend.Claim) string {
	var on []byte
	for _, v := range tr.vs {
		record, err := v.Mini.Get(c.Key)
		switch {
		case err != nil:
			on = append(on, '-')
		case strings.HasPrefix(record, c.Token+"#"), strings.HasPrefix(record, c.Token+"~"):
			on = append(on, 'x')
		case strings.HasPrefix(record, "kept-"+c.Token):
			on = append(on, 'k')
		default:
			on = append(on, '?')
		}
	}
	return string(on)
}

// want fails the test unless holds returns on.
func (tr trial) want(t *testing.T, what string, c backend.Claim, on string) {
	t.Helper()
	synctest.Wait()
	if got := tr.holds(c); got != on {
		t.Errorf("%s: held on %s, want %s", what, got, on)
	}
}

// each runs f for the nodes that which lists, from 0 on.
func (tr trial) each(which string, f func(v *redistest.VirtualServer)) {
	for _, c := range which {
		f(tr.vs[c-'0'])
	}
}

// took fails the test unless exactly want of virtual time has passed since began.
func took(t *testing.T, what string, began time.Time, want time.Duration) {
	t.Helper()
	if got := time.Since(began); got != want {
		t.Errorf("%s took %v, want %v", what, got, want)
	}
}

// isOutage fails the test unless err is an outage with one line for each node that
// which lists, and no others.
func isOutage(t *testing.T, what string, err error, which string) {
	t.Helper()
	if err == nil || backend.Definite(err) {
		t.Errorf("%s: got %v, want an outage", what, err)
		return
	}
	var all *multierror.Error
	if !errors.As(err, &all) {
		t.Errorf("%s: got %T: %v, want a *multierror.Error", what, err, err)
		return
	}
	if len(all.Errors) != len(which) {
		t.Errorf("%s: got %d lines, want one for each of %s: %v", what, len(all.Errors), which, err)
	}
	for _, c := range which {
		if name := fmt.Sprintf("node%c:", c+1); !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %q does not name %s", what, err, name)
		}
	}
}

// running returns the goroutines of this package that have not ended, without the
// caller's. In a bubble it returns those of the bubble.
func running() []string {
	buf := make([]byte, 8<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	bubble := ""
	if _, b, ok := strings.Cut(strings.SplitN(all[0], "\n", 2)[0], "synctest bubble "); ok {
		bubble = "synctest bubble " + b
	}
	var left []string
	for _, g := range all[1:] {
		head, _, _ := strings.Cut(g, "\n")
		if strings.Contains(head, bubble) && (strings.Contains(g, "hasp/redlock.(*") || strings.Contains(g, "go-redsync")) && !strings.Contains(g, "testing.tRunner") {
			left = append(left, g)
		}
	}
	return left
}

// A call does not wait for answers that cannot change the verdict.
func TestTheFastestQuorumDecides(t *testing.T) {
	for _, kind := range []func(string) backend.Claim{aClaim, aFenced} {
		for n, hung := range map[int]string{3: "2", 5: "13"} {
			try(t, n, nil, func(t *testing.T, tr trial) {
				other := tr.direct(t, nil)
				late := drives(t, tr.vs.Clients(), nil) // knows nothing of the nodes yet
				tr.each(hung, func(v *redistest.VirtualServer) { v.Proxy.Stall() })
				began := time.Now()

				c := kind("k")
				tr.acquire(t, tr.d, c)
				took(t, "a grant", began, 0)
				strategytest.Want(t, "renew", renewOne(tr.d, c, time.Second), nil)
				took(t, "a renewal", began, 0)
				if _, err := late.Acquire(t.Context(), aClaim("k")); !errors.Is(err, backend.ErrHeld) {
					t.Errorf("acquire what is held: %v", err)
				}
				took(t, "a refusal", began, 0)
				tr.release(t, tr.d, c)
				took(t, "a release", began, 0)
				strategytest.Want(t, "release again", tr.d.Release(t.Context(), c), backend.ErrLost)
				took(t, "a release in vain", began, 0)

				c = kind("j")
				tr.acquire(t, other, c)
				if err := renewOne(tr.d, kind("j"), time.Second); !errors.Is(err, backend.ErrLost) {
					t.Errorf("renew what another holds: %v", err)
				}
				took(t, "a loss", began, 0)
			})
		}
	}
}

// If so many nodes are down that no quorum is possible, no call waits for the nodes that hang.
func TestAnImpossibleQuorumIsAnOutageAtOnce(t *testing.T) {
	for n, which := range map[int][2]string{3: {"01", "2"}, 5: {"024", "3"}} {
		try(t, n, nil, func(t *testing.T, tr trial) {
			down, hung := which[0], which[1]
			held := aClaim("held")
			tr.acquire(t, tr.d, held)
			synctest.Wait()
			tr.each(down, func(v *redistest.VirtualServer) { v.Proxy.Down() })
			tr.each(hung, func(v *redistest.VirtualServer) { v.Proxy.Stall() })
			began := time.Now()
			_, err := tr.d.Acquire(t.Context(), aClaim("k"))
			isOutage(t, "acquire", err, down)
			isOutage(t, "renew", renewOne(tr.d, held, time.Second), down)
			isOutage(t, "release", tr.d.Release(t.Context(), held), down)
			took(t, "all of it", began, 0)
		})
	}
}

// stall makes the proxy pass nothing for a while.
func stall(p *faultproxy.Proxy, d time.Duration) { p.Stall(); time.AfterFunc(d, p.Flow) }

// elsewhere stores another program's value under the key.
func elsewhere(t *testing.T, v *redistest.VirtualServer, key string) {
	t.Helper()
	await.Must(t, v.Mini.Set(key, "another"))
}

// holdNext makes the proxy hold the next command that matches, for a while.
func holdNext(p *faultproxy.Proxy, match string, d time.Duration) {
	p.Fail(match, faultproxy.HoldRequest)
	time.AfterFunc(d, p.Release)
}

// Of a term of 1 s a hundredth and 2 ms are not trusted. A quorum that comes after the
// rest has passed is an error, and its records are released. A fence takes another round trip,
// after which the term may be over.
func TestGrantAfterItsTermIsAnError(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		for after, ok := range map[time.Duration]bool{987 * time.Millisecond: true, 988 * time.Millisecond: false, 995 * time.Millisecond: false} {
			try(t, 3, nil, func(t *testing.T, tr trial) {
				c := aClaim("k")
				c.TTL, c.Timeout, c.Fenced = time.Second, 3*time.Second, fenced
				for _, v := range tr.vs[1:] {
					if fenced {
						holdNext(v.Proxy, "3 k "+markKey, after)
					} else {
						stall(v.Proxy, after)
					}
				}
				began := time.Now()
				_, err := tr.d.Acquire(t.Context(), c)
				took(t, "acquire", began, after)
				if ok != (err == nil) || backend.Definite(err) {
					t.Errorf("after %v, fenced %v: %v", after, fenced, err)
				}
				if !ok {
					tr.want(t, "at once", c, "---")
				}
			})
		}
	}
}

var losses = map[string]faultproxy.Fault{"reply lost": faultproxy.LoseReply, "reply hangs": faultproxy.HangReply, "request lost": faultproxy.LoseRequest}

// A reply that is lost on one node changes nothing. If a quorum loses replies, the
// call reports an unknown outcome.
func TestLostReplies(t *testing.T) {
	for name, fault := range losses {
		for _, which := range []string{"1", "02"} {
			t.Run(name+" on "+which, func(t *testing.T) {
				try(t, 3, nil, func(t *testing.T, tr trial) {
					lose := func(c backend.Claim) {
						tr.each(which, func(v *redistest.VirtualServer) { v.Proxy.Fail(c.Token, fault) })
					}
					quorum := len(which) > 1
					check := func(what string, err error) {
						t.Helper()
						if quorum {
							isOutage(t, what, err, which)
						} else if err != nil {
							t.Errorf("%s: %v", what, err)
						}
						time.Sleep(5 * time.Millisecond) // a command may wait for a hung connection a millisecond
						synctest.Wait()
						for _, v := range tr.vs {
							if v.Proxy.Pending() > 0 {
								t.Fatalf("%s: the fault has not happened", what)
							}
						}
					}

					c := aClaim("k")
					lose(c)
					_, err := tr.d.Acquire(t.Context(), c)
					check("acquire", err)
					if !quorum {
						tr.release(t, tr.d, c)
					}
					time.Sleep(4 * time.Second)
					tr.want(t, "after acquire", c, "---")

					c = aClaim("k")
					tr.acquire(t, tr.d, c)
					synctest.Wait()                                        // a vote that comes after the first renewal counts only from the next one on
					if err := renewOne(tr.d, c, time.Second); err != nil { // the scripts are known from here on
						t.Errorf("renew: %v", err)
					}
					synctest.Wait()
					time.Sleep(5 * time.Second)
					lose(c)
					check("renew", renewOne(tr.d, c, 2*time.Second))
					time.Sleep(probeEvery) // a node without an answer is left alone until then
					strategytest.Want(t, "renew again", renewOne(tr.d, c, 2*time.Second), nil)
					synctest.Wait()
					for i, v := range tr.vs {
						if left := v.Mini.TTL("k"); left < 8*time.Second {
							t.Errorf("node %d has it for %v", i, left)
						}
					}

					lose(c)
					check("release", tr.d.Release(t.Context(), c))
					time.Sleep(4 * time.Second)
					tr.want(t, "after release", c, "---")
					strategytest.Want(t, "release again", tr.d.Release(t.Context(), c), backend.ErrLost)
				})
			})
		}
	}
}

// Two nodes voted for a refused attempt, two did not, and one is down. The nodes'
// answers do not show whether the token holds the key. The driver knows.
func TestReleaseAfterASplitVoteIsLost(t *testing.T) {
	try(t, 5, nil, func(t *testing.T, tr trial) {
		tr.warm(t, tr.d, aClaim("k"))
		tr.each("01", func(v *redistest.VirtualServer) {
			strategytest.Want(t, "set", v.Direct().Set(t.Context(), "k", "stranger", time.Minute).Err(), nil)
		})
		tr.vs[4].Kill()
		tr.each("23", func(v *redistest.VirtualServer) { v.Proxy.Delay(20 * time.Millisecond) }) // what they have is given back late

		c := aClaim("k")
		if _, err := tr.d.Acquire(t.Context(), c); !errors.Is(err, backend.ErrHeld) {
			t.Fatalf("acquire: got %v, want ErrHeld", err)
		}
		// A Release may overtake the release of the votes.
		tr.d.hs.mu.Lock()
		a := tr.d.hs.byToken[c.Token]
		tr.d.hs.mu.Unlock()
		if a == nil || !a.failed {
			t.Error("the driver does not know that the token holds nothing")
		}
		strategytest.Want(t, "release", tr.d.Release(t.Context(), c), backend.ErrLost)
		strategytest.Want(t, "renew", renewOne(tr.d, c, time.Second), backend.ErrLost)
		tr.each("23", func(v *redistest.VirtualServer) { v.Proxy.Delay(0) })
	})
}
