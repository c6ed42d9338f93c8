package main

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/simulate/world"
)

// late counts the terms of grants from the replies.
type late struct{ driver }

func (d late) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	g, err := d.driver.Acquire(ctx, c)
	if err == nil {
		g.Until = time.Now().Add(c.TTL)
	}
	return g, err
}

// forgetful reports a Release with an unknown outcome as one that has ended the hold.
type forgetful struct{ driver }

func (d forgetful) Release(ctx context.Context, c backend.Claim) error {
	err := d.driver.Release(ctx, c)
	if err != nil && ctx.Err() == nil {
		return nil
	}
	return err
}

// trusting takes a renewal that was not answered for one that was.
type trusting struct{ driver }

func (d trusting) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	d.driver.Renew(ctx, cs, func(i int, g backend.Grant, err error) {
		if ctx.Err() != nil {
			err = nil
		}
		done(i, g, err)
	})
}

// impatient grants a key while another entry is ahead.
type impatient struct{ driver }

func (d impatient) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	short, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	g, err := d.driver.Wait(short, c)
	if err != nil && ctx.Err() == nil {
		return backend.Grant{Until: time.Now().Add(c.TTL)}, nil
	}
	return g, err
}

// The simulation finds drivers that are broken.
func TestPlantedBugsAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		wrap  func(driver) backend.Driver
		finds string // a part of an error that finds the bug
	}{
		"terms count from the reply":           {func(d driver) backend.Driver { return late{d} }, "two holders"},
		"a lost Release counts as done":        {func(d driver) backend.Driver { return forgetful{d} }, "left"},
		"a renewal without an answer succeeds": {func(d driver) backend.Driver { return trusting{d} }, "two holders"},
		"a grant before its turn":              {func(d driver) backend.Driver { return impatient{d} }, "two holders"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			var all []string
			found := false
			seed := uint64(1)
			for ; seed <= 300 && !found; seed++ {
				world.Find(t, kind(c.wrap), seed, func(text string) {
					mu.Lock()
					defer mu.Unlock()
					all = append(all, text)
					found = found || strings.Contains(text, c.finds)
				})
			}
			if !found {
				t.Errorf("not found; %d other errors: %.1000q", len(all), all)
			} else {
				t.Logf("seed %d, %d errors", seed-1, len(all))
			}
		})
	}
}
