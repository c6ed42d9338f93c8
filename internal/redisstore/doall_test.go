package redisstore

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// virtualStore is a Store over a client of a server in virtual time.
func virtualStore(t *testing.T) (*Store, *redistest.VirtualServer) {
	v := redistest.Virtual(t)
	return New(v.Client()), v
}

func TestDoAllAnswersEachCommandByItself(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, nil)
	s, err := open(t, srv.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	key := "together:" + t.Name()
	replies := s.DoAll(t.Context(),
		[]any{"set", key, "one", "px", 60000, "nx"},
		[]any{"set", key, "two", "px", 60000, "nx"},
		[]any{"get", key},
		[]any{"get", key + ":none"},
		[]any{"lpush", key, "x"},
		[]any{"exists", key},
		[]any{"time"})
	want := []any{"OK", nil, "one", nil, nil, int64(1)}
	for i, w := range want {
		if failed := i == 4; replies[i].Value != w || (replies[i].Err != nil) != failed {
			t.Errorf("reply %d: %v, %v; want %v", i, replies[i].Value, replies[i].Err, w)
		}
	}
	if err := replies[4].Err; !strings.HasPrefix(err.Error(), s.Name()+": WRONGTYPE") {
		t.Errorf("%v does not name the server", err)
	}
	if parts, ok := replies[6].Value.([]any); !ok || len(parts) != 2 {
		t.Errorf("time: %v, %v", replies[6].Value, replies[6].Err)
	}
}

// None is sent again, since the store may have carried it out.
func TestDoAllSendsOnce(t *testing.T) {
	for name, fault := range map[string]faultproxy.Fault{"reply": faultproxy.LoseReply, "request": faultproxy.LoseRequest} {
		synctest.Test(t, func(t *testing.T) {
			s, v := virtualStore(t)
			v.Proxy.Commands()
			v.Proxy.Fail("incr n", fault)
			replies := s.DoAll(t.Context(), []any{"incr", "n"}, []any{"get", "n"})
			for i, r := range replies {
				if r.Err == nil || r.Value != nil || !strings.HasPrefix(r.Err.Error(), s.Name()+": ") {
					t.Errorf("%s lost: reply %d: %v, %v", name, i, r.Value, r.Err)
				}
			}
			count := 0
			for _, c := range v.Proxy.Commands() {
				if c == "incr n" {
					count++
				}
			}
			if count != 1 {
				t.Errorf("%s lost: sent %d times", name, count)
			}
		})
	}
}

func TestDoAllEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, v := virtualStore(t)
		if r := s.DoAll(t.Context(), []any{"ping"}); r[0].Value != "PONG" {
			t.Fatalf("ping: %v", r[0].Err)
		}
		v.Proxy.Stall()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		replies := s.DoAll(ctx, []any{"get", "a"}, []any{"get", "b"})
		if took := time.Since(began); took > time.Second {
			t.Errorf("took %v", took)
		}
		for i, r := range replies {
			if r.Err == nil {
				t.Errorf("reply %d of a server that hangs: %v", i, r.Value)
			}
		}
		v.Proxy.Flow()
	})
}

// The connections of a Store that was opened let go of a call whose caller has
// gone, which is told so.
func TestDoAllIsInterrupted(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true})
	proxy := srv.Proxy()
	s, err := open(t, "redis://"+proxy.Addr(), nil)
	if err != nil {
		t.Fatal(err)
	}
	proxy.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []Reply, 1)
	go func() { done <- s.DoAll(ctx, []any{"get", "a"}, []any{"get", "b"}) }()
	cancel()
	select {
	case replies := <-done:
		for i, r := range replies {
			if r.Err == nil || !strings.Contains(r.Err.Error(), context.Canceled.Error()) {
				t.Errorf("reply %d: %v, %v", i, r.Value, r.Err)
			}
		}
	case <-time.After(20 * time.Second):
		t.Error("a call whose caller has gone does not end")
	}
	proxy.Flow()
}
