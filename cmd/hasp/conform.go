package main

import (
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
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/redisstore"
)

// clause is a conformance.Result for programs.
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
		Short: "Check a strategy on its store against the contract",
		Long: `conform runs the conformance suite on what --url names: the same clauses that
every driver must pass, here on your store, your network and your settings. It
uses keys that contain "hasp-conformance-" and a random part. What it leaves of
them, such as fence counters, goes with its term.

What cannot be checked from outside, because it needs the store stopped or its
clock moved, is skipped with the reason. The exit code is 1 if a clause failed.`,
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
			if err := a.conform(ctx, c, asJSON); err != nil {
				return causeOf(ctx, err)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// conform runs the suite. Clauses over several processes start this program
// again with the same arguments; there, Check does not return.
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
		return err
	case asJSON:
		if perr := a.printJSON(out); perr != nil {
			return perr
		}
	default:
		fmt.Fprintf(a.out, "\n%s: %d passed, %d failed, %d skipped in %s\n", c.Strategy,
			counts[conformance.Pass], counts[conformance.Fail], counts[conformance.Skip], short(time.Since(began)))
		fmt.Fprintln(a.out, "What is skipped for want of a Harness field needs the store in hand: see package conformance.")
	}
	if err != nil && ctx.Err() == nil {
		return codeError{exitFailed, errors.New(strings.TrimPrefix(err.Error(), "conformance: "))}
	}
	return err
}

// harness opens drivers by c. If its only node is a server that is reached over
// plain TCP, the suite can also go by links of its own, which it disturbs; the
// server does not notice more than a client that comes and goes.
func harness(c hasp.Config) conformance.Harness {
	h := conformance.Harness{Open: func(ctx context.Context, link string) (backend.Driver, error) {
		by := c
		if link != "" {
			before, _, after, _ := hostOf(c.Nodes[0])
			by.Nodes = []string{before + link + after}
		}
		return by.Driver(ctx)
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

// sameStore opens drivers of another strategy on the store of c.
func sameStore(c hasp.Config, strategy string) func(context.Context, string) (backend.Driver, error) {
	c.Strategy, c.Params = strategy, maps.Clone(c.Params)
	maps.DeleteFunc(c.Params, func(name, _ string) bool { return !slices.Contains(redisstore.Params, name) })
	return func(ctx context.Context, _ string) (backend.Driver, error) { return c.Driver(ctx) }
}

// hostOf takes host:port out of redis://user:password@host:port/db.
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

// printResult prints one line, and for a failure what the contract says.
func printResult(out io.Writer, r conformance.Result, colour bool) {
	status, paint := r.Status.String(), ""
	switch r.Status {
	case conformance.Pass:
		paint = styleGood
	case conformance.Fail:
		paint = styleDead
	case conformance.Skip:
		paint = styleDim
	}
	took := ""
	if r.Elapsed > 0 {
		took = short(r.Elapsed)
	}
	line := &row{max: 1 << 20, colour: colour}
	line.put(paint, status)
	line.put("", fmt.Sprintf("  %-34s %8s", plain(r.Name), took))
	if r.Reason != "" {
		line.put(styleDim, "  "+plain(r.Reason))
	}
	fmt.Fprintln(out, line.String())
	if r.Status == conformance.Fail {
		fmt.Fprintf(out, "      want: %s\n      got:  %s\n", plain(r.Why), plain(r.Err.Error()))
	}
}
