package redlock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// If the caller cancels before any node has answered, the error is the context's.
func TestACancelledInspectIsNoOutage(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		tr.each("012", hang)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if _, err := tr.d.Inspect(ctx, "k"); err != context.DeadlineExceeded {
			t.Errorf("got %v, want the context's error", err)
		}
		took(t, "Inspect", began, time.Second)

		_, err := tr.d.Inspect(t.Context(), "k")
		isOutage(t, "Inspect that waits", err, "012")
	})
}

// A node that refuses to read the key must not report a lost hold. A server without memory refuses
// each SET, but a key that is held is still reported as held.
func TestErrorRepliesAreOutages(t *testing.T) {
	for what, command := range map[string][]any{
		"no right":  {"acl", "setuser", "default", "-getrange", "-mget"},
		"no memory": {"config", "set", "maxmemory", "1"},
	} {
		nodes := redistest.StartNodes(t, 3, &redistest.Options{Own: true, Real: true})
		d := drives(t, nodes.Clients(), nil)
		held, again, free := aFenced("k"), aClaim("k"), aFenced("free")
		for _, c := range []*backend.Claim{&held, &again, &free} {
			c.TTL, c.Timeout = time.Minute, 10*time.Second
		}
		await.Must(t, ask(t, d, held))
		for _, srv := range nodes.Servers {
			await.Must(t, srv.Client().Do(t.Context(), command...).Err())
		}
		free.Fenced = what == "no right"
		err := ask(t, d, free)
		isUnclear(t, what+": acquire", err)
		if strings.Contains(fmt.Sprint(err), "no fence") {
			t.Errorf("%s: %v", what, err)
		}
		if free.Fenced {
			isUnclear(t, "renew", renewOne(d, held))
			isUnclear(t, "release", d.Release(t.Context(), held))
		} else {
			wants(t, "acquire what is held", ask(t, d, again), backend.ErrHeld)
		}
	}
}

// A key has no holder if no record can have a quorum. A node that is silent may have
// a copy of any record.
func TestAKeyHasNoHolderIfNoRecordCanHaveAQuorum(t *testing.T) {
	for nodes, want := range map[string]bool{ // a and b are records, - is a free node, and ? a silent one
		"--?": true,  // a quorum is free
		"ab-": true,  // the votes are split
		"aa-": false, // a quorum has a record
		"a-?": false, // a silent node may have it
		"aa?": false, // all that answer have it
		"ab?": false, // two records, and a silent node
	} {
		s := newSurvey(3)
		for i, record := range nodes {
			pttl := int64(1000)
			if record == '-' {
				pttl = -2
			}
			if f, ok := redisstore.Decode([]any{pttl, string(record) + "#", ""}); record != '?' && ok {
				s.add(i, &f, nil)
			}
		}
		if got := s.unheld(); got != want {
			t.Errorf("%s: unheld is %v", nodes, got)
		}
	}
}

// token is as long as the engine's.
const token = "AAAABBBBCCCCDDDDEEEEFF"

// put writes a record of a key to some nodes, for ttl.
func (tr trial) put(t *testing.T, key, record string, ttl time.Duration, nodes ...int) {
	t.Helper()
	for _, i := range nodes {
		await.Must(t, tr.vs[i].Mini.Set(key, record))
		tr.vs[i].Mini.SetTTL(key, ttl)
	}
}

// A key is listed if a quorum has its record, whichever nodes these are.
func TestListOfAQuorum(t *testing.T) {
	try(t, 5, func(t *testing.T, tr trial) {
		tr.put(t, "all", token+"#one", time.Minute, 0, 1, 2, 3, 4)
		tr.put(t, "first", token+"#two", time.Minute, 0, 1, 2)
		tr.put(t, "last", token+"~2#three", time.Minute, 2, 3)
		tr.put(t, "last", token+"~2#three", time.Minute/2, 4)
		tr.put(t, "minority", token+"#four", time.Minute, 1, 2)
		tr.put(t, "split", token+"~2#five", time.Minute, 0, 1)
		tr.put(t, "split", token+"~3#six", time.Minute, 2, 3)
		tr.put(t, "foreign", "value", time.Minute, 0, 1, 2, 3, 4)
		list := func(gone, want string) {
			t.Helper()
			tr.each(gone, down)
			all, err := strategytest.Listed(t.Context(), tr.d, "")
			var got []string
			for key, s := range all {
				got = append(got, key+" "+s.Owner)
				if !s.Held || s.TTL <= 0 {
					t.Errorf("without %q: %s: %+v", gone, key, s)
				}
			}
			slices.Sort(got)
			if text := strings.Join(got, ", "); err != nil || text != want {
				t.Errorf("without %q: got %s, %v, want %s", gone, text, err, want)
			}
			tr.each(gone, up)
			time.Sleep(time.Second)
		}
		list("", "all one, first two, last three")
		list("0", "all one, last three")
		list("4", "all one, first two")
		list("03", "all one")
		time.Sleep(time.Minute / 2) // the end of one copy of three
		list("", "all one, first two")
	})
}

func TestListInAnOutage(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		for i := range 120 {
			tr.put(t, fmt.Sprint(i), token+"#me", time.Hour, 0, 1, 2)
		}
		tr.each("1", hang)
		began := time.Now()
		all, err := strategytest.Listed(t.Context(), tr.d, "")
		if took := time.Since(began); err != nil || len(all) != 120 || took > 6*time.Second {
			t.Errorf("one of three hangs: %d keys after %v, %v", len(all), took, err)
		}

		tr.each("2", hang)
		_, err = strategytest.Listed(t.Context(), tr.d, "")
		isOutage(t, "two of three hang", err, "12")

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		wants(t, "cancelled", strategytest.ErrOf(strategytest.Listed(ctx, tr.d, "")), context.Canceled)
	})
}
