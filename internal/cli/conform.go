package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/redisstore"
)

func (a *app) conformCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "conform",
		Short: "Check whether a strategy keeps its promises on your store",
		Long: `conform runs hasp's conformance suite on the strategy and the store that --url
names. The suite is a list of clauses. Each clause checks one promise about
locks, here on your store, your network and your settings. It takes ten seconds to a
minute.

The keys contain "hasp-conformance-" and a random part. Fence counters remain. On
Redis they expire after fence_ttl, which is 30 days unless the URL sets it. A few
keys stay held for up to a minute after the end.

A clause is skipped, with the reason, if the strategy does not make the promise,
or if the check would have to stop the store or move its clock. The exit code is
1 if a clause failed.`,
		Example: `  hasp conform
  hasp conform --url spinlock+redis://localhost:6379`,
		RunE: a.conform,
	}
}

// conform runs the suite and prints the results. It returns an error if a clause failed. Some
// clauses start this program again with the same arguments. In such a child process, Check does not
// return.
func (a *app) conform(cmd *cobra.Command, _ []string) error {
	c, err := a.config(cmd)
	if err != nil {
		return err
	}

	ctx := cmd.Context()
	began := time.Now()
	counts := map[string]int{}
	err = conformance.Check(ctx, harness(c), func(r conformance.Result) {
		counts[r.Status]++
		a.printClause(r)
	})

	switch {
	case len(counts) == 0 && err != nil:
		// The suite did not begin. The inner error is about the store, and the outer one about the
		// suite.
		return cmp.Or(errors.Unwrap(err), err)
	case ctx.Err() == nil: // else the suite was interrupted, and the counts are not complete
		fmt.Fprintf(a.out, "\n%s: %d passed, %d failed, %d skipped in %s\n", c.Strategy,
			counts["pass"], counts["fail"], counts["skip"], text.Duration(time.Since(began)))
		fmt.Fprintln(a.out, `A clause skipped because of "Harness" needs control over the store: `+
			`a Go test with package conformance can run it.`)
	}

	if err != nil && ctx.Err() == nil {
		return errors.New(strings.TrimPrefix(err.Error(), "conformance: "))
	}
	return err
}

// printClause prints one line about the result of a clause, and two more lines after a failure.
func (a *app) printClause(r conformance.Result) {
	took := ""
	if r.Elapsed > 0 {
		took = text.Duration(r.Elapsed)
	}

	line := fmt.Sprintf("%s  %-34s %8s  %s", r.Status, text.Plain(r.Name), took,
		text.Plain(r.Reason))
	fmt.Fprintln(a.out, strings.TrimRight(line, " "))
	if r.Err != nil {
		fmt.Fprintf(a.out, "      want: %s\n      got:  %s\n", text.Plain(r.Why),
			text.Plain(a.store.redact(r.Err.Error())))
	}
}

// harness returns a harness that opens drivers of c. If the only node is a server on plain TCP, the
// harness also has a Link. This is a proxy, so the suite disturbs only its own connections.
func harness(c hasp.Config) conformance.Harness {
	server := serverOf(c)
	h := conformance.Harness{Open: func(ctx context.Context, link string) (backend.Driver, error) {
		via := c
		if link != "" { // the address of a Link, so server is not nil
			u := *server
			u.Host = link
			via.Nodes = []string{u.String()}
		}

		return via.Driver(ctx)
	}}
	if server != nil {
		h.Link = func(context.Context, string) (*conformance.Link, error) {
			return conformance.TCP(server.Host)
		}
	}

	// All strategies on one Redis must exclude each other. If c is one of them, the others have the
	// same configuration, but without parameters of c's strategy, which they may not know.
	onRedis := []string{"spinlock", "pubsublock", "fairlock"}
	h.Others = map[string]func(context.Context, string) (backend.Driver, error){}
	for _, strategy := range onRedis {
		if strategy == c.Strategy || !slices.Contains(onRedis, c.Strategy) {
			continue
		}
		other := c
		other.Strategy = strategy
		other.Params = maps.Clone(c.Params)
		maps.DeleteFunc(other.Params, func(name, _ string) bool {
			return !slices.Contains(redisstore.Params, name)
		})
		h.Others[strategy] = func(ctx context.Context, _ string) (backend.Driver, error) {
			return other.Driver(ctx)
		}
	}

	return h
}

// serverOf returns the URL of the only node of c if this node is a server on plain TCP, and nil
// otherwise.
func serverOf(c hasp.Config) *url.URL {
	if len(c.Nodes) != 1 {
		return nil
	}
	u, err := url.Parse(c.Nodes[0])
	if err != nil || u.Scheme != "redis" {
		return nil
	}
	if _, _, err := net.SplitHostPort(u.Host); err != nil { // several servers, or no port
		return nil
	}
	return u
}
