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

// report prints a line about a finding, and counts the line if it is bad. The argument what names
// the thing that the finding is about.
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
	if err := d.examineServers(ctx, c); err != nil {
		return &backend.UnavailableError{Err: err}
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

// examineServers reports on the settings of each server of a Redis. It examines no other stores. It
// returns an error if a server cannot be reached; but a node of redlock gets only a line, because
// the other nodes may be a quorum.
func (d *doctor) examineServers(ctx context.Context, c hasp.Config) error {
	isRedis := strings.Contains(describe(c.Strategy).URL, "redis://")
	if !isRedis {
		return nil
	}

	isQuorum := c.Strategy == "redlock"
	for _, list := range c.Nodes {
		nodes := []string{list}
		if isQuorum {
			var err error
			nodes, err = redisstore.Nodes(list)
			if err != nil {
				return err
			}
		}

		for _, node := range nodes {
			err := redisstore.Examine(ctx, node, c.Params, !isQuorum, d.report)
			switch {
			case err == nil:
			case isQuorum && ctx.Err() == nil:
				d.report(redisstore.Warn, "node", err.Error())
			default:
				return err
			}
		}
	}
	return nil
}

// doNothing is the work under a lock that is taken only to try the store.
func doNothing(context.Context, *hasp.Lease) error { return nil }

// doctorKey is not a random key, because filelock keeps a file for each key.
const doctorKey = "hasp-doctor"

// doctorWait bounds each wait, because another hasp doctor may hold the key.
var doctorWait = hasp.WithMaxWait(10 * time.Second)

// try reports what the user may do, and how long a lock takes.
func (d *doctor) try(ctx context.Context, client *hasp.Client) {
	if d.tryRights(ctx, client) {
		d.tryLatency(ctx, client)
	}
}

// tryRights reports what the user may do. It returns false if the user cannot even lock and renew.
func (d *doctor) tryRights(ctx context.Context, client *hasp.Client) bool {
	extend := func(ctx context.Context, l *hasp.Lease) error {
		return l.Extend(ctx, time.Until(l.Expires()))
	}
	lock := func(opt hasp.Option) error {
		return hasp.Do(ctx, client, doctorKey, extend, opt, doctorWait)
	}
	if err := lock(nil); err != nil { // a nil option has no effect
		d.report(redisstore.Bad, "rights", err.Error())
		return false
	}

	rights := "the user may do all that this strategy has"
	_, err := client.Inspect(ctx, doctorKey)
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
	return true
}

// tryLatency reports how long a lock takes, and which terms are too short for that.
func (d *doctor) tryLatency(ctx context.Context, client *hasp.Client) {
	times := make([]time.Duration, 20)
	for i := range times {
		began := time.Now()
		if err := hasp.Do(ctx, client, doctorKey, doNothing, doctorWait); err != nil {
			d.report(redisstore.Bad, "latency", err.Error())
			return
		}
		times[i] = time.Since(began)
	}

	slices.Sort(times)
	median := times[len(times)/2]
	longest := times[len(times)-1]

	// A renewal begins after a third of the term. If the term is ten times the longest time, the
	// rest is long enough for several slow attempts.
	shortest := 10 * longest
	finding := fmt.Sprintf(
		"a lock and its unlock take %s, and %s in the worst of %d; a term shorter than %s is at risk",
		text.Duration(median), text.Duration(longest), len(times), text.Duration(shortest))
	d.report(redisstore.OK, "latency", finding)
}
