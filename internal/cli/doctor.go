package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/redisstore"
)

// doctor has the state of a call of hasp doctor.
type doctor struct {
	*app
	bad int // how many lines are bad
}

func (a *app) doctorCommand() *cobra.Command {
	d := &doctor{app: a}
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the settings of a store, and say what they may cost a lock",
		Long: `doctor locks the key "hasp-doctor" in the store that --url names, to see what the user
may do and how long that takes. On Redis it also reads the settings of each server:
the version, the role, eviction, persistence, replication and the clock. Each line
begins with

  ok    nothing to do
  warn  a fault of the store may cost a lock; the line says how, and what to set
  bad   locks fail, or have two holders, although the store has no fault

The exit code is 1 if a line is bad. "hasp conform" checks the promises themselves.`,
		Example: `  hasp doctor --url spinlock+redis://localhost:6379`,
		RunE:    d.examine,
	}
}

// report prints a line about a finding, and counts it if it is bad. The argument what names what
// was examined.
func (d *doctor) report(level, what, finding string) {
	if level == redisstore.Bad {
		d.bad++
	}
	fmt.Fprintf(d.out, "%-4s  %s: %s\n", level, text.Plain(what), text.Plain(d.store.redact(finding)))
}

// examine is the body of hasp doctor. It examines each server of a Redis, and then locks a key. It
// returns an error if any line is bad, or if the store cannot be reached.
func (d *doctor) examine(cmd *cobra.Command, _ []string) error {
	c, err := d.config(cmd)
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	alone := c.Strategy != "redlock" // the locks are on one server, and not on a quorum
	isRedis := strings.Contains(describe(c.Strategy).URL, "redis://")
	for _, list := range c.Nodes {
		nodes := []string{list}
		switch {
		case !alone:
			nodes, err = redisstore.Nodes(list)
		case !isRedis:
			nodes = nil // the settings of other stores are not examined
		}
		for _, node := range nodes {
			err = redisstore.Examine(ctx, node, c.Params, alone, d.report)
			if err != nil && !alone && ctx.Err() == nil {
				d.report(redisstore.Warn, "node", err.Error()) // the other nodes may be a quorum
				err = nil
			}
		}

		if err != nil {
			return &backend.UnavailableError{Err: err}
		}
	}

	if d.bad == 0 { // otherwise Open fails for the same reason
		client, err := c.Open(ctx, nil)
		if err != nil {
			return err
		}
		defer client.Close()
		d.try(ctx, client)
	}

	if d.bad > 0 {
		return fmt.Errorf("bad lines: %d", d.bad)
	}
	return nil
}

// doNothing is the work under a lock that is taken only to try the store.
func doNothing(context.Context, *hasp.Lease) error { return nil }

// try reports what the user may do, and how long a lock takes.
func (d *doctor) try(ctx context.Context, client *hasp.Client) {
	const key = "hasp-doctor" // not a random key, because filelock keeps a file for each key
	rights := "the user may do all that this strategy has"
	maxWait := hasp.WithMaxWait(10 * time.Second) // another hasp doctor may hold the key
	extend := func(ctx context.Context, l *hasp.Lease) error {
		return l.Extend(ctx, time.Until(l.Expires()))
	}
	lock := func(opt hasp.Option) error {
		return hasp.Do(ctx, client, key, extend, opt, maxWait)
	}
	if err := lock(nil); err != nil { // a nil option has no effect
		d.report(redisstore.Bad, "rights", err.Error())
		return
	}
	_, err := client.Inspect(ctx, key)
	for what, err := range map[string]error{
		"inspect":  err,
		"fence":    lock(hasp.WithFence()),
		"shared":   lock(hasp.WithShared()),
		"min hold": lock(hasp.WithMinHold(1)),
	} {
		if err != nil && !errors.Is(err, errors.ErrUnsupported) {
			d.report(redisstore.Warn, what, err.Error())
			rights = "the user may lock, renew and unlock; " +
				"the documentation of the strategy lists the rights for the rest"
		}
	}

	d.report(redisstore.OK, "rights", rights)

	took := make([]time.Duration, 20)
	for i := range took {
		began := time.Now()
		if err := hasp.Do(ctx, client, key, doNothing, maxWait); err != nil {
			d.report(redisstore.Bad, "latency", err.Error())
			return
		}
		took[i] = time.Since(began)
	}

	// A renewal begins after a third of the term. If the term is ten times the longest time, the
	// rest is long enough for several slow attempts.
	slices.Sort(took)
	longest := took[len(took)-1]
	d.report(redisstore.OK, "latency", fmt.Sprintf(
		"a lock and its unlock take %s, and %s in the worst of %d; a term shorter than %s is at risk",
		text.Duration(took[len(took)/2]), text.Duration(longest), len(took), text.Duration(10*longest)))
}
