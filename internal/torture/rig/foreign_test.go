package rig

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redistest"
)

// others are clients of other libraries.
var others = []Strategy{
	{Name: "hasp", Term: hostTerms * term, Redis: 1, Client: func(ctx context.Context, addrs []string, term time.Duration) (Locker, error) {
		return OpenHasp(ctx, "spinlock+redis://"+addrs[0]+"/0", term)
	}},
	{Name: "naive", Term: hostTerms * term, Redis: 1, Client: func(_ context.Context, addrs []string, term time.Duration) (Locker, error) {
		return naive{redis.NewClient(clientOptions(addrs[0])), term}, nil
	}},
}

// naive is a lock without a renewal, whose holder does not know when it ends.
type naive struct {
	*redis.Client
	term time.Duration
}

func (n naive) Lock(ctx context.Context, key string) (Held, error) {
	for {
		switch _, err := n.SetArgs(ctx, key, "", redis.SetArgs{Mode: "NX", TTL: n.term}).Result(); {
		case err == nil:
			return naiveHeld{n, key}, nil
		case !errors.Is(err, redis.Nil):
			return nil, err
		}
		time.Sleep(pollEvery)
	}
}

type naiveHeld struct {
	n   naive
	key string
}

func (naiveHeld) Lost() <-chan struct{}              { return nil }
func (naiveHeld) Until() time.Time                   { return time.Time{} }
func (h naiveHeld) Unlock(ctx context.Context) error { return h.n.Del(ctx, h.key).Err() }

// The same faults find what another library breaks, and break nothing of hasp in the same
// clients.
func TestOtherLibraries(t *testing.T) {
	redistest.NeedSets(t)
	needHosts(t, onHosts)
	o := options{Program: Program{More: others}, place: onHosts, seed: 1, time: 5 * time.Second, term: hostTerms * term, patience: patience}
	for _, o.strategy = range []string{"hasp", "naive"} {
		var b strings.Builder
		res, err := do(t.Context(), o, &b)
		if err != nil {
			t.Fatal(err)
		}
		two := false
		for _, v := range res.Violations {
			two = two || v.Promise == "one at a time"
		}
		if res.Found.Holds == 0 || two != (o.strategy == "naive") || len(res.Violations) > 0 && o.strategy == "hasp" {
			t.Errorf("two at once: %v\n%s", two, b.String())
		}
	}
}
