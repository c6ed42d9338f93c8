package redlock

import (
	"context"
	"errors"
	"fmt"
	"regexp"
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

// fresh runs f with n nodes that have no marks.
func fresh(t *testing.T, n int, o *Options, f func(t *testing.T, tr trial)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		vs := redistest.VirtualNodes(t, n)
		f(t, trial{vs, drives(t, vs.Clients(), o)})
	})
}

// try runs f with n nodes, all of which vote.
func try(t *testing.T, n int, f func(t *testing.T, tr trial)) {
	t.Helper()
	fresh(t, n, nil, func(t *testing.T, tr trial) {
		tr.meet(t, tr.d, aFenced)
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

// another returns another driver.
func (tr trial) another(t *testing.T) *driver { return drives(t, tr.vs.Clients(), nil) }

// direct returns another driver, which does not use the proxies.
func (tr trial) direct(t *testing.T) *driver {
	clients := tr.vs.Clients()
	for i, v := range tr.vs {
		clients[i] = v.Direct()
	}
	return drives(t, clients, nil)
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
func tryOnce(t *testing.T, d *driver, c backend.Claim, number, lead int) error {
	_, _, err := d.ct.attempt(t.Context(), c, number, lead, nil)
	return err
}

// acquire takes c.Key, or stops the test.
func (tr trial) acquire(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	await.Must(t, ask(t, d, c))
}

// release frees c.Key, or fails the test.
func (tr trial) release(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	wants(t, "release", d.Release(t.Context(), c), nil)
}

// kinds are the kinds of claims.
var kinds = []func(string) backend.Claim{aClaim, aFenced}

// warm takes c.Key and releases it on all nodes, so that d knows them.
func (tr trial) warm(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	tr.acquire(t, d, c)
	synctest.Wait()
	tr.release(t, d, c)
	synctest.Wait()
}

// meet lets d ask for votes until it knows all nodes: the connections that the first claim makes
// have the second one ask again.
func (tr trial) meet(t *testing.T, d *driver, kind func(string) backend.Claim) {
	t.Helper()
	for range 2 {
		tr.warm(t, d, kind("warm"))
	}
}

// ask tries to take c.Key.
func ask(t *testing.T, d *driver, c backend.Claim) error {
	_, err := d.Acquire(t.Context(), c)
	return err
}

var wants = strategytest.Want

// renewOne renews one hold. It returns an error if no answer comes in time.
func renewOne(d *driver, c backend.Claim) error {
	ctx, cancel := context.WithTimeout(context.Background(), max(2*c.Timeout, 3*time.Second))
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

// left fails the test unless each node that has a record of c has it for a time from least to most.
func (tr trial) left(t *testing.T, what string, c backend.Claim, least, most time.Duration) {
	t.Helper()
	synctest.Wait()
	for i, v := range tr.vs {
		if left := v.Mini.TTL(c.Key); tr.holds(c)[i] != '-' && (left < least || left > most) {
			t.Errorf("%s: node %d has it for %v, want %v to %v", what, i, left, least, most)
		}
	}
}

// These disturb a node, or end that.
var (
	down  = func(v *redistest.VirtualServer) { v.Proxy.Down() }
	up    = func(v *redistest.VirtualServer) { v.Proxy.Up() }
	hang  = func(v *redistest.VirtualServer) { v.Proxy.Stall() }
	flow  = func(v *redistest.VirtualServer) { v.Proxy.Flow() }
	empty = func(v *redistest.VirtualServer) { v.Mini.FlushAll() }
)

// delay makes the answers of a node late.
func delay(d time.Duration) func(v *redistest.VirtualServer) {
	return func(v *redistest.VirtualServer) { v.Proxy.Delay(d) }
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
	var all *multierror.Error
	if backend.Definite(err) || !errors.As(err, &all) || len(all.Errors) != len(which) {
		t.Errorf("%s: got %v, want an outage of %s", what, err, which)
		return
	}
	for _, c := range which {
		if !strings.Contains(err.Error(), fmt.Sprintf("node%c:", c+1)) {
			t.Errorf("%s: %q does not name one of %s", what, err, which)
		}
	}
}

// isUnclear fails the test if err is nil or says that a key is held, or a hold lost.
func isUnclear(t *testing.T, what string, err error) {
	t.Helper()
	if err == nil || backend.Definite(err) {
		t.Errorf("%s: got %v, want an outage", what, err)
	}
}

// running returns the goroutines of this package in the caller's bubble that have not ended, without
// the caller's.
func running() (left []string) {
	buf := make([]byte, 8<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	bubble := regexp.MustCompile(`synctest bubble \d+`).FindString(all[0])
	for _, g := range all[1:] {
		ours := strings.Contains(g, "hasp/redlock.(*") || strings.Contains(g, "go-redsync")
		if ours && strings.Contains(g, bubble+"]") && !strings.Contains(g, "testing.tRunner") {
			left = append(left, g)
		}
	}
	return left
}

// A call does not wait for answers that cannot change the verdict.
func TestTheFastestQuorumDecides(t *testing.T) {
	for _, kind := range kinds {
		for n, hung := range map[int]string{3: "2", 5: "13"} {
			try(t, n, func(t *testing.T, tr trial) {
				mine, others := kind("k"), kind("j")
				tr.acquire(t, tr.direct(t), others)
				late := tr.another(t) // knows nothing of the nodes yet
				tr.each(hung, hang)
				began := time.Now()
				tr.acquire(t, tr.d, mine)
				tr.renews(t, "a renewal", mine)
				wants(t, "acquire what is held", ask(t, late, aClaim("k")), backend.ErrHeld)
				tr.release(t, tr.d, mine)
				wants(t, "release again", tr.d.Release(t.Context(), mine), backend.ErrLost)
				tr.lost(t, "renew what another holds", kind("j"))
				took(t, "all of it", began, 0)
			})
		}
	}
}

// If so many nodes are down that no quorum is possible, no call waits for the nodes that hang.
func TestAnImpossibleQuorumIsAnOutageAtOnce(t *testing.T) {
	for n, nodes := range map[int]struct{ down, hung string }{3: {"01", "2"}, 5: {"024", "3"}} {
		try(t, n, func(t *testing.T, tr trial) {
			held := aClaim("held")
			tr.acquire(t, tr.d, held)
			synctest.Wait()
			tr.each(nodes.down, down)
			tr.each(nodes.hung, hang)
			began := time.Now()
			isOutage(t, "acquire", ask(t, tr.d, aClaim("k")), nodes.down)
			isOutage(t, "renew", renewOne(tr.d, held), nodes.down)
			isOutage(t, "release", tr.d.Release(t.Context(), held), nodes.down)
			took(t, "all of it", began, 0)
		})
	}
}

// elsewhere returns a function that stores another program's value under the key.
func elsewhere(t *testing.T, key string) func(v *redistest.VirtualServer) {
	return func(v *redistest.VirtualServer) {
		t.Helper()
		await.Must(t, v.Mini.Set(key, "another"))
	}
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
	const trusted = 988 * time.Millisecond
	for _, kind := range kinds {
		for _, after := range []time.Duration{trusted - time.Millisecond, trusted, trusted + 7*time.Millisecond} {
			try(t, 3, func(t *testing.T, tr trial) {
				c := kind("k")
				c.TTL, c.Timeout = time.Second, 3*time.Second
				for _, v := range tr.vs[1:] {
					if c.Fenced {
						holdNext(v.Proxy, "3 k "+markKey, after)
					} else {
						v.Proxy.Stall()
						time.AfterFunc(after, v.Proxy.Flow)
					}
				}
				began := time.Now()
				err := ask(t, tr.d, c)
				took(t, "acquire", began, after)
				if after < trusted {
					wants(t, "acquire", err, nil)
					return
				}
				isUnclear(t, fmt.Sprintf("after %v, fenced %v", after, c.Fenced), err)
				tr.want(t, "at once", c, "---")
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
				try(t, 3, func(t *testing.T, tr trial) {
					// check makes a call whose replies are lost.
					check := func(what string, c backend.Claim, call func() error) {
						t.Helper()
						tr.each(which, func(v *redistest.VirtualServer) { v.Proxy.Fail(c.Token, fault) })
						if err := call(); which == "1" {
							wants(t, what, err, nil)
						} else {
							isOutage(t, what, err, which)
						}
						time.Sleep(5 * time.Millisecond) // a command may wait for a hung connection a millisecond
						tr.each(which, happened(t, what))
					}

					c := aClaim("k")
					check("acquire", c, func() error { return ask(t, tr.d, c) })
					if which == "1" {
						tr.release(t, tr.d, c)
					}
					time.Sleep(4 * time.Second)
					tr.want(t, "after acquire", c, "---")

					c = aClaim("k")
					tr.acquire(t, tr.d, c)
					synctest.Wait()                           // a vote that comes after the first renewal counts only from the next one on
					wants(t, "renew", renewOne(tr.d, c), nil) // the scripts are known from here on
					time.Sleep(5 * time.Second)
					check("renew", c, func() error { return renewOne(tr.d, c) })
					time.Sleep(probeEvery) // a node without an answer is left alone until then
					wants(t, "renew again", renewOne(tr.d, c), nil)
					tr.left(t, "renewed", c, 8*time.Second, c.TTL)

					check("release", c, func() error { return tr.d.Release(t.Context(), c) })
					time.Sleep(4 * time.Second)
					tr.want(t, "after release", c, "---")
					wants(t, "release again", tr.d.Release(t.Context(), c), backend.ErrLost)
				})
			})
		}
	}
}

// happened returns a function that stops the test if a fault of a node has not happened.
func happened(t *testing.T, what string) func(v *redistest.VirtualServer) {
	return func(v *redistest.VirtualServer) {
		t.Helper()
		synctest.Wait()
		if v.Proxy.Pending() > 0 {
			t.Fatalf("%s: the fault has not happened", what)
		}
	}
}

// Two nodes voted for a refused attempt, two did not, and one is down. The nodes' answers do not
// show whether the token holds the key. The driver knows, also before it has released the votes.
func TestReleaseAfterASplitVoteIsLost(t *testing.T) {
	try(t, 5, func(t *testing.T, tr trial) {
		c := aClaim("k")
		tr.each("01", elsewhere(t, "k"))
		tr.each("01", delay(time.Millisecond)) // they refuse when the others have voted
		tr.vs[4].Kill()
		tr.each("23", func(v *redistest.VirtualServer) { v.Proxy.Fail("waits:k "+c.Token, faultproxy.HoldRequest) })
		wants(t, "acquire", ask(t, tr.d, c), backend.ErrHeld)
		tr.each("23", happened(t, "the release of a vote"))
		wants(t, "release", tr.d.Release(t.Context(), c), backend.ErrLost)
		wants(t, "renew", renewOne(tr.d, c), backend.ErrLost)
		tr.want(t, "the votes", c, "??xx-")
		tr.each("23", func(v *redistest.VirtualServer) { v.Proxy.Release() })
	})
}
