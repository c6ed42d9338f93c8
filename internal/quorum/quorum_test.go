package main

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) {
	logging.Disable()
	os.Exit(m.Run())
}

// TestQuick sees that everybody took part in everything, and that no two had a
// key at once, which the measurement itself checks. Figures are not for tests.
func TestQuick(t *testing.T) {
	redistest.Start(t, &redistest.Options{Real: true}) // or there is no redis-server
	o := small()
	var b strings.Builder
	if err := measure(t.Context(), o, &b); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + b.String())
	for _, c := range contestants {
		want := len(o.conditions) + 1 // the commands
		if c.races {
			want++
		}
		if n := strings.Count(b.String(), "\n| "+c.name+" |"); n != want {
			t.Errorf("%s has %d rows, want %d", c.name, n, want)
		}
		if ours := strings.Count(b.String(), "\n| "+c.name+": "); c.ours != (ours > 0) {
			t.Errorf("%s has %d goals, want some: %v", c.name, ours, c.ours)
		}
	}
}

// echo is a server that says what it hears.
func echo(t *testing.T) *proxy {
	addr := redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		b := make([]byte, 16)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			_, _ = c.Write(b[:n])
		}
	})
	p, err := newProxy(func() (net.Conn, error) { return net.Dial("tcp", addr) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.down)
	return p
}

func ask(c net.Conn) (took time.Duration, err error) {
	began := time.Now()
	if _, err := c.Write([]byte("x")); err != nil {
		return 0, err
	}
	_, err = c.Read(make([]byte, 1))
	return time.Since(began), err
}

func TestProxyIsSlowAndGoneWhenTold(t *testing.T) {
	t.Parallel()
	p := echo(t)
	dial := func() net.Conn {
		c, err := net.Dial("tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	c := dial()
	if _, err := ask(c); err != nil {
		t.Fatal(err)
	}
	const delay = 300 * time.Millisecond
	p.slow(delay)
	if _, err := ask(c); err == nil {
		t.Error("a connection from before the proxy was slow is still there")
	}
	c = dial()
	if took, err := ask(c); err != nil || took < delay {
		t.Errorf("a slow proxy answered after %v (%v), want %v at least", took, err, delay)
	}
	addr := p.addr
	p.down()
	if _, err := ask(c); err == nil {
		t.Error("a proxy that is down answers")
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		c.Close()
		t.Error("a proxy that is down can be called")
	}
	if err := p.up(); err != nil {
		t.Fatal(err)
	}
	if p.addr != addr {
		t.Errorf("up again at %s, want %s", p.addr, addr)
	}
	if _, err := ask(dial()); err != nil {
		t.Error(err)
	}
}

func TestVotesTellSplitOnesFromRefused(t *testing.T) {
	t.Parallel()
	var v votes
	set := func(token string) redis.Cmder {
		return redis.NewStatusCmd(t.Context(), "set", "key", token, "px", 8000, "nx")
	}
	v.cast(set("before it begins"), nil)
	v.begin()
	answers := func(token string, yes, no int) {
		for range yes {
			v.cast(set(token), nil)
		}
		for range no {
			v.cast(set(token), redis.Nil)
		}
	}
	answers("won", 3, 2)
	answers("refused", 0, 5)
	answers("refused by the one that was asked", 0, 1)
	answers("split", 2, 3)
	answers("split", 1, 4) // again with the same value
	answers("half a vote", 1, 0)
	v.cast(set("lost"), errors.New("no answer"))
	v.cast(redis.NewStatusCmd(t.Context(), "set", "key", "value"), nil)
	v.cast(redis.NewStatusCmd(t.Context(), "get", "key"), nil)
	refused := redis.NewBoolCmd(t.Context(), "set", "key", "by a command that has no error", "nx")
	v.cast(refused, nil)
	if got, want := v.count(), (tally{all: 8, split: 3}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestOnlyOneMayHaveTheKey(t *testing.T) {
	t.Parallel()
	r := running{race: race{shares: make([]int, 2)}}
	r.answered(t.Context(), 0, time.Now(), nil)
	r.freed()
	r.answered(t.Context(), 1, time.Now(), nil)
	if r.err != nil {
		t.Error(r.err)
	}
	r.answered(t.Context(), 0, time.Now(), nil)
	if r.err == nil {
		t.Error("two had the key at once, and that is no error")
	}
}

// BenchmarkPair is a Lock and Unlock of a lone caller, all well.
func BenchmarkPair(b *testing.B) {
	redistest.Start(b, &redistest.Options{Real: true})
	set, err := startSet(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer set.stop()
	m := &measurement{small(), set}
	all, leave, err := m.enter(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer leave()
	for _, e := range all {
		b.Run(e.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				unlock, err := e.lock(b.Context(), e.key())
				if err == nil {
					err = unlock(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
