package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/redisstore"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the settings of a store, and say what they may cost a lock",
		Long: `doctor takes a key of its own in the store that --url names, to see what the user
may do and how long that takes. On Redis it also reads the settings of each server:
the version, the role, eviction, persistence, replication and the clock. Each line
begins with

  ok    nothing to do
  warn  a fault of the store may cost a lock; the line says how, and what to set
  bad   a lock may fail, or have two holders, although no fault comes

The exit code is 1 if a line is bad. "hasp conform" checks the promises themselves.`,
		Example: `  hasp doctor --url spinlock+redis://localhost:6379`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.config(cmd)
			if err != nil {
				return err
			}
			return a.doctor(cmd.Context(), c)
		},
	}
}

func (a *app) doctor(ctx context.Context, c hasp.Config) error {
	bad := 0
	var broken error // the last error of a write
	found := func(all ...redisstore.Finding) {
		for _, f := range all {
			if f.Level == redisstore.Bad {
				bad++
			}
			if _, err := fmt.Fprintf(a.out, "%-4s  %s: %s\n", f.Level, text.Plain(f.What), text.Plain(a.store.redact(f.Text))); err != nil {
				broken = err
			}
		}
	}
	for _, list := range c.Nodes {
		nodes := []string{list}
		switch {
		case !strings.Contains(describe(c.Strategy).URL, "redis://"):
			continue
		case c.Strategy == "redlock":
			var err error
			if nodes, err = redisstore.Nodes(list); err != nil {
				return err
			}
		}
		for _, node := range nodes {
			all, err := redisstore.Examine(ctx, node, c.Params, c.Strategy != "redlock")
			found(all...)
			switch {
			case err != nil && (len(c.Nodes) > 1 || len(nodes) > 1) && ctx.Err() == nil:
				found(redisstore.Finding{Level: redisstore.Warn, What: "node", Text: err.Error()}) // others may be a quorum
			case err != nil:
				return err
			}
		}
	}

	if bad == 0 { // otherwise Open fails with the same reason
		client, err := c.Open(ctx, nil)
		if err != nil {
			return err
		}
		defer client.Close()
		found(tryLocks(ctx, client)...)
	}
	if bad > 0 {
		return failedf("%s", text.Count(bad, "line is bad", "lines are bad"))
	}
	return printed(broken)
}

// tryLocks finds out what the user may do, and how long a lock takes.
func tryLocks(ctx context.Context, client *hasp.Client) (all []redisstore.Finding) {
	key := "hasp-doctor-" + rand.Text()
	var unsupported []string
	for _, try := range []struct {
		what string
		opt  hasp.Option
	}{{"lock", nil}, {"fence", hasp.WithFence()}, {"shared", hasp.WithShared()}, {"min hold", hasp.WithMinHold(1)}} {
		err := hasp.Do(ctx, client, key, func(ctx context.Context, l *hasp.Lease) error { return l.Extend(ctx, time.Minute) }, try.opt)
		switch {
		case errors.Is(err, errors.ErrUnsupported):
			unsupported = append(unsupported, try.what)
		case err != nil && try.opt == nil:
			return []redisstore.Finding{{Level: redisstore.Bad, What: try.what, Text: err.Error()}}
		case err != nil:
			all = append(all, redisstore.Finding{Level: redisstore.Warn, What: try.what, Text: err.Error()})
		}
	}
	if _, err := client.Inspect(ctx, key); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		all = append(all, redisstore.Finding{Level: redisstore.Warn, What: "inspect", Text: err.Error()})
	}
	rights := "the user may do all that this strategy has"
	switch {
	case len(all) > 0:
		rights = "the user may lock, renew and unlock; docs/redis.md lists the rights for the rest"
	case len(unsupported) > 0:
		rights += ", which is not: " + strings.Join(unsupported, ", ")
	}

	const pairs = 20
	took := make([]time.Duration, pairs)
	for i := range took {
		began := time.Now()
		if err := hasp.Do(ctx, client, key, func(context.Context, *hasp.Lease) error { return nil }); err != nil {
			return append(all, redisstore.Finding{Level: redisstore.Bad, What: "latency", Text: err.Error()})
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return append(all, redisstore.Finding{Level: redisstore.OK, What: "rights", Text: rights},
		redisstore.Finding{Level: redisstore.OK, What: "latency", Text: fmt.Sprintf("a lock and its unlock take %s, at most %s of %d; a term shorter than %s is at risk",
			text.Duration(took[pairs/2]), text.Duration(took[pairs-1]), pairs, text.Duration(10*took[pairs-1]))})
}
