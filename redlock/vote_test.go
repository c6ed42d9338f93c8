package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-multierror"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// last returns the verdict if no vote is pending.
func last(acquiring bool, n int, count [5]int) verdict {
	quorum := n/2 + 1
	switch {
	case count[yes] >= quorum && acquiring:
		return undecided // redsync counts these votes
	case count[yes] >= quorum:
		return won
	case acquiring && count[failed]+count[unknown] > n-quorum:
		return noQuorum
	case acquiring || count[no] > n-quorum:
		return refused
	}
	return noQuorum
}

// sure returns the verdict that all possible pending votes lead to, or undecided.
func sure(acquiring bool, n int, count [5]int) verdict {
	if count[pending] == 0 {
		return last(acquiring, n, count)
	}
	so := verdict(-1)
	for v := yes; v <= unknown; v++ {
		next := count
		next[pending]--
		next[v]++
		switch s := sure(acquiring, n, next); {
		case so == -1:
			so = s
		case so != s:
			return undecided
		}
	}
	return so
}

// permutations calls f with every order of 0 to n-1.
func permutations(n int, f func(order []int)) {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var from func(k int)
	from = func(k int) {
		if k == n {
			f(order)
			return
		}
		for i := k; i < n; i++ {
			order[k], order[i] = order[i], order[k]
			from(k + 1)
			order[k], order[i] = order[i], order[k]
		}
	}
	from(0)
}

// combinations calls f with every choice of one of several for each of n.
func combinations(n, several int, f func(choice []int)) {
	choice := make([]int, n)
	for {
		f(choice)
		i := 0
		for ; i < n; i++ {
			if choice[i]++; choice[i] < several {
				break
			}
			choice[i] = 0
		}
		if i == n {
			return
		}
	}
}

func TestABallotIsDecidedOnceByTheDecidingVote(t *testing.T) {
	t.Parallel()
	for n := range 6 {
		if n == 0 {
			continue
		}
		for _, taken := range []bool{true, false} {
			r := holdRule
			if taken {
				r = acquireRule
			}
			known := map[[5]int]verdict{}
			want := func(count [5]int) verdict {
				v, ok := known[count]
				if !ok {
					v = sure(taken, n, count)
					known[count] = v
				}
				return v
			}
			combinations(n, 4, func(choice []int) {
				permutations(n, func(order []int) {
					b := newBallot(make([]*node, n), r)
					count := [5]int{pending: n}
					for _, i := range order {
						v := yes + vote(choice[i])
						before := b.result()
						now := b.cast(i, v, nil)
						got := b.result()
						count[pending]--
						count[v]++
						over := false
						select {
						case <-b.done:
							over = true
						default:
						}
						if w := want(count); got != w || now != (before == undecided && w != undecided) || over != (w != undecided) || before != undecided && got != before {
							t.Fatalf("%d nodes, acquiring %v, votes %v in order %v: verdict %d after vote of %d, decided now %v, done %v; want %d",
								n, taken, choice, order, got, i, now, over, w)
						}
					}
				})
			})
		}
	}
}

// The states of a node when a caller asks for the key.
const (
	free   = iota
	taken  // by somebody's record
	cut    // cuts all connections
	mute   // loses its reply
	barred // answers with an error
	kinds
)

const secret = "hunter2"

// guarded returns nodes in virtual time that require a password, and a driver that has
// used them.
func guarded(t *testing.T, n int) (guardedNodes, *driver) {
	vs := redistest.VirtualNodes(t, n)
	clients := make([]redis.UniversalClient, n)
	for i, v := range vs {
		v.Mini.RequireAuth(secret)
		o := *v.Client().Options()
		o.Password, o.MaxRetries, o.ReadTimeout, o.WriteTimeout = secret, -1, -1, -1
		rdb := redis.NewClient(&o)
		t.Cleanup(func() { rdb.Close() })
		clients[i] = rdb
	}
	d := drives(t, clients, nil)
	take(t, d, claim("first"))
	marks := make([]string, n)
	synctest.Wait()
	for i, v := range vs {
		marks[i], _ = v.Mini.Get(markKey)
	}
	return guardedNodes{vs, marks}, d
}

// guardedNodes are nodes with a password, and their marks.
type guardedNodes struct {
	redistest.VirtualServers
	marks []string
}

// spoilMark makes a node answer with an error if its mark is read.
func spoilMark(v *redistest.VirtualServer) {
	v.Mini.Del(markKey)
	_, _ = v.Mini.Lpush(markKey, "no mark")
}

// ready returns when all nodes vote again, and the clients have noticed all dead
// connections.
func (g guardedNodes) ready(t *testing.T, d *driver) {
	t.Helper()
	for try := range 20 {
		c := claim(fmt.Sprint("ready", try))
		_, err := d.Acquire(t.Context(), c)
		synctest.Wait()
		all := err == nil
		for _, v := range g.VirtualServers {
			all = all && v.Mini.Exists(c.Key)
		}
		_ = d.Release(t.Context(), c)
		settle()
		if all {
			return
		}
	}
	t.Fatal("some nodes stay away")
}

// claim returns a claim for key, with a token of its own.
func claim(key string) backend.Claim {
	return backend.Claim{Key: key, Token: "token-" + key, Owner: "me", TTL: time.Minute, Timeout: time.Second}
}

func take(t *testing.T, d *driver, c backend.Claim) backend.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), c.Timeout)
	defer cancel()
	g, err := d.Acquire(ctx, c)
	if err != nil {
		t.Fatalf("%s: %v", c.Key, err)
	}
	return g
}

// settle waits until all calls in flight have ended, but not until terms end.
func settle() { time.Sleep(5 * time.Second); synctest.Wait() }

// outageOf fails the test unless err is an outage with a line for at least that many
// nodes, all of them bad, each line names its node, and err matches no other error.
func outageOf(t *testing.T, what string, err error, d *driver, bad []bool, least int) {
	t.Helper()
	var m *multierror.Error
	if !errors.As(err, &m) {
		t.Errorf("%s: got %v, want an outage", what, err)
		return
	}
	for _, not := range []error{backend.ErrHeld, backend.ErrLost, backend.ErrInvalid, errors.ErrUnsupported, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, not) {
			t.Errorf("%s: an outage that is %q, too: %v", what, not, err)
		}
	}
	lines := strings.Split(err.Error(), "\n")
	if strings.Contains(err.Error(), secret) || len(lines) != len(m.Errors)+1 || len(m.Errors) < least {
		t.Errorf("%s: %q", what, err)
	}
	for i, n := range d.nodes {
		count := 0
		for _, e := range m.Errors {
			count += strings.Count(e.Error(), n.name)
		}
		if count > 1 || count == 1 && !bad[i] {
			t.Errorf("%s: node %d is named %d times:\n%v", what, i, count, err)
		}
	}
}

// prepare puts each node into the state that choice names, with respect to key.
func (g guardedNodes) prepare(key string, choice []int) (bad []bool) {
	bad = make([]bool, len(choice))
	for i, v := range g.VirtualServers {
		switch choice[i] {
		case taken:
			v.Mini.Set(key, "somebody's")
		case cut:
			v.Proxy.Down()
		case mute:
			v.Proxy.Fail("set "+key+" token-"+key, faultproxy.LoseReply)
		case barred:
			spoilMark(v)
		}
		bad[i] = choice[i] >= cut
	}
	return bad
}

// restore undoes prepare. Records of failed attempts are released meanwhile.
func (g guardedNodes) restore(t *testing.T, d *driver, key string, choice []int) {
	for i, v := range g.VirtualServers {
		switch choice[i] {
		case cut:
			v.Proxy.Up()
		case barred:
			v.Mini.Del(markKey)
			v.Mini.Set(markKey, g.marks[i])
		case taken:
			v.Mini.Del(key)
		}
	}
	if slices.Max(choice) >= cut {
		g.ready(t, d)
	}
}

func tally(choice []int, n int) (all [kinds]int, bad int) {
	for _, c := range choice[:n] {
		all[c]++
		if c >= cut {
			bad++
		}
	}
	return all, bad
}

func TestTheResultFollowsTheVotes(t *testing.T) {
	for n, several := range map[int]int{3: kinds, 5: mute} {
		t.Run(fmt.Sprintf("%d nodes", n), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g, d := guarded(t, n)
				quorum := n/2 + 1
				combinations(n, several, func(choice []int) {
					key := fmt.Sprintf("k%v", choice)
					key = strings.ReplaceAll(key, " ", "")
					what := fmt.Sprintf("nodes %v", choice)
					bad := g.prepare(key, choice)
					all, out := tally(choice, n)
					began := time.Now()
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					_, err := d.Acquire(ctx, claim(key))
					if took := time.Since(began); took > 0 {
						t.Errorf("%s: took %v, though whatever the nodes say is there at once", what, took)
					}
					switch {
					case all[free] >= quorum:
						if err != nil {
							t.Errorf("%s: %v", what, err)
						}
					case out > n-quorum:
						outageOf(t, what, err, d, bad, n-quorum+1)
					case err == nil && all[free]+all[mute] >= quorum: // which loses one reply, and is asked again
					default:
						var held *backend.HeldError
						var m *multierror.Error
						if !errors.As(err, &held) || errors.As(err, &m) {
							t.Errorf("%s: got %v, want ErrHeld", what, err)
						}
					}
					g.restore(t, d, key, choice)
					if err == nil {
						if err := d.Release(t.Context(), claim(key)); err != nil {
							t.Errorf("%s: release: %v", what, err)
						}
					}
					settle()
					for i, v := range g.VirtualServers {
						if v.Mini.Exists(key) {
							t.Errorf("%s: node %d keeps the key", what, i)
						}
					}
				})
			})
		})
	}
}

// A vote for the first attempt of a call comes after the release of the hold that a second attempt
// has won. A node that is not released yet has a record of the hold. Both are no quorum for a
// renewal.
func TestALateVoteRenewsNothingAfterTheRelease(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.warm(t, tr.d, aClaim("w"))
		c := aClaim("k")
		elsewhere(t, tr.vs[0], "k")
		elsewhere(t, tr.vs[1], "k")
		tr.vs[2].Proxy.Fail(c.Token, faultproxy.HoldRequest)
		if _, err := tr.d.tryAcquire(t.Context(), c, 0, noLead, &queueState{}); !errors.Is(err, backend.ErrHeld) {
			t.Fatalf("the first attempt: got %v, want ErrHeld", err)
		}
		synctest.Wait()
		if tr.vs[2].Proxy.Pending() > 0 {
			t.Fatal("node 3 was not asked")
		}
		tr.lose("01", "k")
		if _, err := tr.d.tryAcquire(t.Context(), c, 1, noLead, &queueState{}); err != nil {
			t.Fatalf("the second attempt: %v", err)
		}
		tr.want(t, "held", c, "xxx")

		tr.vs[0].Proxy.Fail(c.Token, faultproxy.HoldRequest)
		tr.release(t, tr.d, c)
		tr.want(t, "released", c, "x--")
		tr.vs[2].Proxy.Delay(200 * time.Millisecond) // until then the late vote is not released
		tr.vs[2].Proxy.Release()
		tr.want(t, "the late vote", c, "x-x")
		if err := renewOne(tr.d, c, time.Second); !errors.Is(err, backend.ErrLost) {
			t.Errorf("renew: got %v, want ErrLost", err)
		}
		if err := tr.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
			t.Errorf("release again: got %v, want ErrLost", err)
		}
		tr.vs[0].Proxy.Release()
		time.Sleep(5 * time.Second)
		tr.want(t, "afterwards", c, "---")
	})
}
