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

// caller is a driver, and the test that uses it.
type caller struct {
	*testing.T
	*driver
}

type server = redistest.VirtualServer

// disturb does something to a node.
type disturb func(v *server)

// trial is a set of nodes in virtual time, and a caller that reaches them through their proxies.
type trial struct {
	caller
	vs redistest.VirtualServers
}

// fresh runs f with n nodes that have no marks.
func fresh(t *testing.T, n int, o *Options, f func(tr trial)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		vs := redistest.VirtualNodes(t, n)
		f(trial{drives(t, vs.Clients(), o), vs})
	})
}

// try runs f with n nodes, all of which vote.
func try(t *testing.T, n int, f func(tr trial)) {
	t.Helper()
	fresh(t, n, nil, func(tr trial) {
		tr.meet(aFenced)
		f(tr)
	})
}

// three runs f with three nodes, all of which vote.
func three(t *testing.T, f func(tr trial)) {
	t.Helper()
	try(t, 3, f)
}

// longTerm is the max_ttl of drivers whose options are nil.
const longTerm = 2 * time.Minute

// drives returns a caller whose driver the end of the test closes.
func drives(t *testing.T, clients []redis.UniversalClient, o *Options) caller {
	if o == nil {
		o = &Options{MaxTTL: longTerm}
	}
	d := await.Value(NewDriver(clients, o)).(*driver)
	t.Cleanup(func() { d.Close() })
	return caller{t, d}
}

// another returns another caller.
func (tr trial) another() caller { return drives(tr.T, tr.vs.Clients(), nil) }

// direct returns another caller, which does not use the proxies.
func (tr trial) direct() caller {
	clients := tr.vs.Clients()
	for i, v := range tr.vs {
		clients[i] = v.Direct()
	}
	return drives(tr.T, clients, nil)
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

// kinds are the kinds of claims.
var kinds = []func(string) backend.Claim{aClaim, aFenced}

// tryOnce makes one attempt.
func (cr caller) tryOnce(c backend.Claim, number, lead int) error {
	_, _, err := cr.ct.attempt(cr.Context(), c, number, lead, nil)
	return err
}

// ask tries to take c.Key.
func (cr caller) ask(c backend.Claim) error {
	return strategytest.ErrOf(cr.Acquire(cr.Context(), c))
}

// acquire takes c.Key, or stops the test.
func (cr caller) acquire(c backend.Claim) {
	cr.Helper()
	await.Must(cr, cr.ask(c))
}

// refused fails the test unless c.Key is held.
func (cr caller) refused(c backend.Claim) {
	cr.Helper()
	cr.wants("acquire", cr.ask(c), backend.ErrHeld)
}

// release frees c.Key, or fails the test.
func (cr caller) release(c backend.Claim) {
	cr.Helper()
	cr.wants("release", cr.Release(cr.Context(), c), nil)
}

// releasesNothing fails the test unless a release of c reports a loss.
func (cr caller) releasesNothing(c backend.Claim) {
	cr.Helper()
	cr.wants("release", cr.Release(cr.Context(), c), backend.ErrLost)
}

// warm takes c.Key and releases it on all nodes, so that the driver knows them.
func (cr caller) warm(c backend.Claim) {
	cr.Helper()
	cr.acquire(c)
	synctest.Wait()
	cr.release(c)
	synctest.Wait()
}

// meet asks for votes until the driver knows all nodes: the connections that the first claim makes
// have the second one ask again.
func (cr caller) meet(kind func(string) backend.Claim) {
	cr.Helper()
	for range 2 {
		cr.warm(kind("warm"))
	}
}

// renew renews one hold. It returns an error if no answer comes in time.
func (cr caller) renew(c backend.Claim) error {
	ctx, cancel := context.WithTimeout(context.Background(), max(2*c.Timeout, 3*time.Second))
	defer cancel()
	err := errors.New("not answered")
	cr.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
	return err
}

// renews fails the test unless c is renewed at once.
func (cr caller) renews(c backend.Claim) {
	cr.Helper()
	began := time.Now()
	cr.wants("renew", cr.renew(c), nil)
	cr.took("renew", began, 0)
}

// lost fails the test unless a renewal reports the loss of c at once.
func (cr caller) lost(c backend.Claim) {
	cr.Helper()
	began := time.Now()
	cr.wants("renew", cr.renew(c), backend.ErrLost)
	cr.took("renew", began, 0)
}

// wants fails the test unless err matches target.
func (cr caller) wants(what string, err, target error) {
	cr.Helper()
	strategytest.Want(cr.T, what, err, target)
}

// took fails the test unless exactly want of virtual time has passed since began.
func (cr caller) took(what string, began time.Time, want time.Duration) {
	cr.Helper()
	if got := time.Since(began); got != want {
		cr.Errorf("%s took %v, want %v", what, got, want)
	}
}

// isOutage fails the test unless err is an outage with one line for each node that
// which lists, and no others.
func (cr caller) isOutage(what string, err error, which string) {
	cr.Helper()
	var all *multierror.Error
	if backend.Definite(err) || !errors.As(err, &all) || len(all.Errors) != len(which) {
		cr.Errorf("%s: got %v, want an outage of %s", what, err, which)
		return
	}
	for _, c := range which {
		if !strings.Contains(err.Error(), fmt.Sprintf("node%c:", c+1)) {
			cr.Errorf("%s: %q does not name one of %s", what, err, which)
		}
	}
}

// isUnclear fails the test if err is nil or says that a key is held, or a hold lost.
func (cr caller) isUnclear(err error) {
	cr.Helper()
	if err == nil || backend.Definite(err) {
		cr.Errorf("got %v, want an outage", err)
	}
}

// holds returns a letter for each node: x if it has c's record, k if it has a record that was kept
// for c, ? if it has another value under the key, and - if the key is free.
func (tr trial) holds(c backend.Claim) (on string) {
	for _, v := range tr.vs {
		record, err := v.Mini.Get(c.Key)
		switch {
		case err != nil:
			on += "-"
		case isOf(record, c.Token):
			on += "x"
		case isOf(record, "kept-"+c.Token):
			on += "k"
		default:
			on += "?"
		}
	}
	return on
}

// want fails the test unless holds returns on.
func (tr trial) want(c backend.Claim, on string) {
	tr.Helper()
	synctest.Wait()
	if got := tr.holds(c); got != on {
		tr.Errorf("held on %s, want %s", got, on)
	}
}

// left fails the test unless each node that has a record of c has it for a time from least to most.
func (tr trial) left(c backend.Claim, least, most time.Duration) {
	tr.Helper()
	synctest.Wait()
	for i, v := range tr.vs {
		if left := v.Mini.TTL(c.Key); tr.holds(c)[i] != '-' && (left < least || left > most) {
			tr.Errorf("node %d has it for %v, want %v to %v", i, left, least, most)
		}
	}
}

// each runs f for the nodes that which lists, from 0 on.
func (tr trial) each(which string, f disturb) {
	for _, c := range which {
		f(tr.vs[c-'0'])
	}
}

// put writes a record of a key to the nodes that which lists, for ttl.
func (tr trial) put(which, key, record string, ttl time.Duration) {
	tr.Helper()
	tr.each(which, func(v *server) {
		await.Must(tr, v.Mini.Set(key, record))
		v.Mini.SetTTL(key, ttl)
	})
}

// elsewhere stores another program's value under the key.
func (tr trial) elsewhere(which, key string) {
	tr.Helper()
	tr.each(which, func(v *server) { await.Must(tr, v.Mini.Set(key, "another")) })
}

// lose deletes the key.
func (tr trial) lose(which, key string) {
	tr.each(which, func(v *server) { v.Mini.Del(key) })
}

// happened stops the test if a fault of a node has not happened.
func (tr trial) happened(which, what string) {
	tr.Helper()
	synctest.Wait()
	tr.each(which, func(v *server) {
		if v.Proxy.Pending() > 0 {
			tr.Fatalf("%s: the fault has not happened", what)
		}
	})
}

// fail makes a fault happen to the next command that matches.
func (tr trial) fail(which, match string, f faultproxy.Fault) {
	tr.each(which, func(v *server) { v.Proxy.Fail(match, f) })
}

// holdNext holds the next command that matches, for a while.
func (tr trial) holdNext(which, match string, d time.Duration) {
	tr.fail(which, match, faultproxy.HoldRequest)
	time.AfterFunc(d, func() { tr.each(which, func(v *server) { v.Proxy.Release() }) })
}

// These disturb a node, or end that.
var (
	down  = func(v *server) { v.Proxy.Down() }
	up    = func(v *server) { v.Proxy.Up() }
	hang  = func(v *server) { v.Proxy.Stall() }
	flow  = func(v *server) { v.Proxy.Flow() }
	empty = func(v *server) { v.Mini.FlushAll() }
)

// delay makes the answers of a node late.
func delay(d time.Duration) disturb {
	return func(v *server) { v.Proxy.Delay(d) }
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
			try(t, n, func(tr trial) {
				mine, others := kind("k"), kind("j")
				tr.direct().acquire(others)
				late := tr.another() // knows nothing of the nodes yet
				tr.each(hung, hang)
				began := time.Now()
				tr.acquire(mine)
				tr.renews(mine) // a renewal
				late.refused(aClaim("k"))
				tr.release(mine)
				tr.releasesNothing(mine)
				tr.lost(kind("j")) // renew what another holds
				tr.took("all of it", began, 0)
			})
		}
	}
}

// If so many nodes are down that no quorum is possible, no call waits for the nodes that hang.
func TestAnImpossibleQuorumIsAnOutageAtOnce(t *testing.T) {
	for n, nodes := range map[int]struct{ down, hung string }{3: {"01", "2"}, 5: {"024", "3"}} {
		try(t, n, func(tr trial) {
			held := aClaim("held")
			tr.acquire(held)
			synctest.Wait()
			tr.each(nodes.down, down)
			tr.each(nodes.hung, hang)
			began := time.Now()
			tr.isOutage("acquire", tr.ask(aClaim("k")), nodes.down)
			tr.isOutage("renew", tr.renew(held), nodes.down)
			tr.isOutage("release", tr.Release(tr.Context(), held), nodes.down)
			tr.took("all of it", began, 0)
		})
	}
}

// Of a term of 1 s a hundredth and 2 ms are not trusted. A quorum that comes after the
// rest has passed is an error, and its records are released. A fence takes another round trip,
// after which the term may be over.
func TestGrantAfterItsTermIsAnError(t *testing.T) {
	const trusted = 988 * time.Millisecond
	for _, kind := range kinds {
		for _, after := range []time.Duration{trusted - time.Millisecond, trusted, trusted + 7*time.Millisecond} {
			three(t, func(tr trial) {
				c := kind("k")
				tr.Log(after, c.Fenced)
				c.TTL, c.Timeout = time.Second, 3*time.Second
				if c.Fenced {
					tr.holdNext("12", "3 k "+markKey, after)
				} else {
					tr.each("12", hang)
					time.AfterFunc(after, func() { tr.each("12", flow) })
				}
				began := time.Now()
				err := tr.ask(c)
				tr.took("acquire", began, after)
				if after < trusted {
					tr.wants("acquire", err, nil)
					return
				}
				tr.isUnclear(err)
				tr.want(c, "---") // at once
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
				three(t, func(tr trial) {
					// check makes a call whose replies are lost.
					check := func(what string, c backend.Claim, call func() error) {
						tr.Helper()
						tr.fail(which, c.Token, fault)
						if err := call(); which == "1" {
							tr.wants(what, err, nil)
						} else {
							tr.isOutage(what, err, which)
						}
						time.Sleep(5 * time.Millisecond) // a command may wait for a hung connection a millisecond
						tr.happened(which, what)
					}

					c := aClaim("k")
					check("acquire", c, func() error { return tr.ask(c) })
					if which == "1" {
						tr.release(c)
					}
					time.Sleep(4 * time.Second)
					tr.want(c, "---") // after acquire

					c = aClaim("k")
					tr.acquire(c)
					synctest.Wait() // a vote that comes after the first renewal counts only from the next one on
					tr.renews(c)    // the scripts are known from here on
					time.Sleep(5 * time.Second)
					check("renew", c, func() error { return tr.renew(c) })
					time.Sleep(probeEvery) // a node without an answer is left alone until then
					tr.renews(c)
					tr.left(c, 8*time.Second, c.TTL)

					check("release", c, func() error { return tr.Release(tr.Context(), c) })
					time.Sleep(4 * time.Second)
					tr.want(c, "---") // after release
					tr.releasesNothing(c)
				})
			})
		}
	}
}

// Two nodes voted for a refused attempt, two did not, and one is down. The nodes' answers do not
// show whether the token holds the key. The driver knows, also before it has released the votes.
func TestReleaseAfterASplitVoteIsLost(t *testing.T) {
	try(t, 5, func(tr trial) {
		c := aClaim("k")
		tr.elsewhere("01", "k")
		tr.each("01", delay(time.Millisecond)) // they refuse when the others have voted
		tr.vs[4].Kill()
		tr.fail("23", "waits:k "+c.Token, faultproxy.HoldRequest)
		tr.refused(c)
		tr.happened("23", "the release of a vote")
		tr.releasesNothing(c)
		tr.lost(c)
		tr.want(c, "??xx-") // the votes
		tr.each("23", func(v *server) { v.Proxy.Release() })
	})
}
