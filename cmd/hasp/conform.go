package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/cmd/hasp/internal/text"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/redisstore"
)

// clause is a conformance.Result as JSON.
type clause struct {
	Name   string  `json:"name"`
	Status string  `json:"status"`
	Millis float64 `json:"ms"`
	Why    string  `json:"why"`
	Reason string  `json:"reason,omitempty"`
	Error  string  `json:"error,omitempty"`
}

func (a *app) conformCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "conform",
		Short: "Check whether a strategy keeps its promises on your store",
		Long: `conform runs hasp's conformance suite on the strategy and the store that --url
names. The suite is a list of clauses. Each clause checks one promise about
locks, here on your store, your network and your settings. It takes ten to thirty
seconds.

The keys contain "hasp-conformance-" and a random part. Fence counters remain. On
Redis they expire after fence_ttl, which is 30 days unless the URL sets it.

A clause is skipped, with the reason, if the strategy does not make the promise,
or if the check would have to stop the store or move its clock. The exit code is
1 if a clause failed.`,
		Example: `  hasp conform
  hasp conform --url spinlock+redis://localhost:6379`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			c, err := a.config(cmd)
			if err != nil {
				return err
			}
			return causeOf(ctx, a.conform(ctx, c, asJSON))
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// conform runs the suite. Some clauses start this program again with the same
// arguments; in those processes, Check does not return.
func (a *app) conform(ctx context.Context, c hasp.Config, asJSON bool) error {
	var out []clause
	began := time.Now()
	counts := map[conformance.Status]int{}
	err := conformance.Check(ctx, harness(c), func(r conformance.Result) {
		counts[r.Status]++
		if r.Err != nil {
			r.Err = errors.New(a.store.redact(r.Err.Error()))
		}
		if asJSON {
			out = append(out, asClause(r))
		} else {
			printResult(a.out, r, isTerminal(a.out))
		}
	})

	switch {
	case len(counts) == 0 && err != nil: // the suite did not begin
		return cmp.Or(errors.Unwrap(err), err)
	case asJSON:
		if perr := a.printJSON(out); perr != nil {
			return perr
		}
	default:
		fmt.Fprintf(a.out, "\n%s: %d passed, %d failed, %d skipped in %s\n", c.Strategy,
			counts[conformance.Pass], counts[conformance.Fail], counts[conformance.Skip], text.Duration(time.Since(began)))
		fmt.Fprintln(a.out, `A clause skipped because of "Harness" needs control over the store: a Go test with package conformance can run it.`)
	}
	if err != nil && ctx.Err() == nil {
		return failedf("%s", strings.TrimPrefix(err.Error(), "conformance: "))
	}
	return err
}

// harness returns a harness that opens drivers of c. If the only node is a server
// on plain TCP, the suite also connects through links of its own and disturbs
// them. The server only sees clients connect and disconnect.
func harness(c hasp.Config) conformance.Harness {
	h := conformance.Harness{Open: func(ctx context.Context, link string) (backend.Driver, error) {
		linked := c
		if link != "" {
			before, _, after, _ := hostOf(c.Nodes[0])
			linked.Nodes = []string{before + link + after}
		}
		return linked.Driver(ctx)
	}}
	if len(c.Nodes) == 1 {
		if _, host, _, ok := hostOf(c.Nodes[0]); ok {
			h.Link = func(context.Context, string) (*conformance.Link, error) { return conformance.TCP(host) }
		}
	}
	if slices.Contains(onRedis, c.Strategy) {
		for _, other := range onRedis {
			if other != c.Strategy {
				h.Others = append(h.Others, conformance.Other{Name: other, Open: sameStore(c, other)})
			}
		}
	}
	return h
}

// onRedis are the strategies that exclude each other on one Redis.
var onRedis = []string{"spinlock", "pubsublock", "fairlock"}

// sameStore opens drivers of another strategy on the store of c. It keeps the
// parameters that all of them have.
func sameStore(c hasp.Config, strategy string) func(context.Context, string) (backend.Driver, error) {
	c.Strategy, c.Params = strategy, maps.Clone(c.Params)
	maps.DeleteFunc(c.Params, func(name, _ string) bool { return !slices.Contains(redisstore.Params, name) })
	return func(ctx context.Context, _ string) (backend.Driver, error) { return c.Driver(ctx) }
}

// hostOf splits redis://user:password@host:port/db at host:port.
func hostOf(node string) (before, host, after string, ok bool) {
	place, ok := strings.CutPrefix(node, "redis://")
	before = "redis://"
	if at := strings.LastIndex(place, "@"); at >= 0 {
		before, place = before+place[:at+1], place[at+1:]
	}
	host, after = place, ""
	if slash := strings.Index(place, "/"); slash >= 0 {
		host, after = place[:slash], place[slash:]
	}
	_, _, err := net.SplitHostPort(host)
	return before, host, after, ok && err == nil
}

func asClause(r conformance.Result) clause {
	c := clause{Name: r.Name, Status: r.Status.String(), Millis: float64(r.Elapsed.Microseconds()) / 1000,
		Why: r.Why, Reason: r.Reason}
	if r.Err != nil {
		c.Error = r.Err.Error()
	}
	return c
}

// printResult prints one line, and two more for a failure.
func printResult(out io.Writer, r conformance.Result, colour bool) {
	status, paint := r.Status.String(), ""
	switch r.Status {
	case conformance.Pass:
		paint = "32" // green
	case conformance.Fail:
		paint = "31" // red
	case conformance.Skip:
		paint = "2" // dim
	}
	if colour {
		status = "\x1b[" + paint + "m" + status + "\x1b[0m"
	}
	took := ""
	if r.Elapsed > 0 {
		took = text.Duration(r.Elapsed)
	}
	line := fmt.Sprintf("%s  %-34s %8s  %s", status, text.Plain(r.Name), took, text.Plain(r.Reason))
	fmt.Fprintln(out, strings.TrimRight(line, " "))
	if r.Status == conformance.Fail {
		fmt.Fprintf(out, "      want: %s\n      got:  %s\n", text.Plain(r.Why), text.Plain(r.Err.Error()))
	}
}
