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
	three(t, func(tr trial) {
		tr.each("012", hang)
		ctx, cancel := context.WithTimeout(tr.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if _, err := tr.Inspect(ctx, "k"); err != context.DeadlineExceeded {
			tr.Errorf("got %v, want the context's error", err)
		}
		tr.took("Inspect", began, time.Second)

		_, err := tr.Inspect(tr.Context(), "k")
		tr.isOutage("Inspect that waits", err, "012")
	})
}

// A server without memory refuses each SET, but a key that is held is still reported as held. A node
// that refuses to read the key must not report a lost hold.
func TestErrorRepliesAreOutages(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, redistest.Real)
	each := func(command ...any) {
		for _, srv := range nodes.Servers {
			await.Must(t, srv.Client().Do(t.Context(), command...).Err())
		}
	}
	held, again, free := aFenced("k"), aClaim("k"), aClaim("free")
	for _, c := range []*backend.Claim{&held, &again, &free} {
		c.TTL, c.Timeout = time.Minute, 10*time.Second
	}
	cr := drives(t, nodes.Clients(), nil)
	cr.acquire(held)
	each("config", "set", "maxmemory", "1")
	cr.isUnclear(cr.ask(free))
	cr.refused(again)
	each("config", "set", "maxmemory", "0")

	each("acl", "setuser", "default", "-getrange", "-mget")
	free.Fenced = true
	err := cr.ask(free)
	cr.isUnclear(err)
	if strings.Contains(fmt.Sprint(err), "no fence") {
		t.Error(err)
	}
	cr.isUnclear(cr.renew(held))
	cr.isUnclear(cr.Release(t.Context(), held))
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

// A key is listed if a quorum has its record, whichever nodes these are.
func TestListOfAQuorum(t *testing.T) {
	try(t, 5, func(tr trial) {
		tr.put("01234", "all", token+"#one", time.Minute)
		tr.put("012", "first", token+"#two", time.Minute)
		tr.put("23", "last", token+"~2#three", time.Minute)
		tr.put("4", "last", token+"~2#three", time.Minute/2)
		tr.put("12", "minority", token+"#four", time.Minute)
		tr.put("01", "split", token+"~2#five", time.Minute)
		tr.put("23", "split", token+"~3#six", time.Minute)
		tr.put("01234", "foreign", "value", time.Minute)
		list := func(gone, want string) {
			tr.Helper()
			tr.each(gone, down)
			all, err := strategytest.Listed(tr.Context(), tr.caller, "")
			var got []string
			for key, s := range all {
				got = append(got, key+" "+s.Owner)
				if !s.Held || s.TTL <= 0 {
					tr.Errorf("without %q: %s: %+v", gone, key, s)
				}
			}
			slices.Sort(got)
			if text := strings.Join(got, ", "); err != nil || text != want {
				tr.Errorf("without %q: got %s, %v, want %s", gone, text, err, want)
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
	three(t, func(tr trial) {
		for i := range 120 {
			tr.put("012", fmt.Sprint(i), token+"#me", time.Hour)
		}
		tr.each("1", hang)
		began := time.Now()
		all, err := strategytest.Listed(tr.Context(), tr.caller, "")
		if took := time.Since(began); err != nil || len(all) != 120 || took > 6*time.Second {
			tr.Errorf("one of three hangs: %d keys after %v, %v", len(all), took, err)
		}

		tr.each("2", hang)
		_, err = strategytest.Listed(tr.Context(), tr.caller, "")
		tr.isOutage("two of three hang", err, "12")

		ctx, cancel := context.WithCancel(tr.Context())
		time.AfterFunc(time.Millisecond, cancel)
		tr.wants("cancelled", strategytest.ErrOf(strategytest.Listed(ctx, tr.caller, "")), context.Canceled)
	})
}
