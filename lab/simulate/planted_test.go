package main

import (
	"context"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/lab/simulate/world"
)

// hasty counts each renewal as done without asking etcd, which is what a driver does that
// takes a sent keep-alive for an answered one.
type hasty struct{ driver }

func (d hasty) Renew(_ context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	for i := range cs {
		done(i, backend.Grant{}, nil)
	}
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
		"a renewal that asks nobody": {func(d driver) backend.Driver { return hasty{d} }, "two holders"},
		"a grant before its turn":    {func(d driver) backend.Driver { return impatient{d} }, "two holders"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			world.Find(t, etcd(c.wrap), c.finds)
		})
	}
}
