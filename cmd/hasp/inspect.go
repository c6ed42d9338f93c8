package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func (a *app) inspectCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "inspect KEY",
		Short: "Show who holds a key, since when, and who waits",
		Long: `inspect shows what the store knows of KEY: who holds it, since when, how much
of the term is left, the fence, and who waits. Owners are labels for people,
host/pid/program unless the holder chose another.

It exits with 0 whether or not the key is held; --json tells it in "held".`,
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(cmd, "hasp inspect", func(ctx context.Context, client *hasp.Client) error {
				status, err := client.Inspect(ctx, args[0])
				if err != nil {
					return err
				}
				if !asJSON {
					return printStatus(a.out, args[0], status)
				}
				return a.printJSON(struct {
					Key string `json:"key"`
					backend.Status
				}{args[0], status})
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printStatus prints s for people.
func printStatus(out io.Writer, key string, s backend.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("key", "%s", quote(key))
	if s.Held {
		row("state", "held")
		if s.Owner != "" {
			row("owner", "%s", quote(s.Owner))
		}
		if !s.Since.IsZero() {
			row("since", "%s (%s ago)", s.Since.Format(time.RFC3339), short(time.Since(s.Since)))
		}
		if s.TTL < 0 {
			row("term", "without an end")
		} else {
			row("term", "%s left, unless it is renewed", short(s.TTL))
		}
	} else {
		row("state", "free")
	}
	if s.Fence != 0 {
		row("fence", "%d", s.Fence)
	}
	for i, waiter := range s.Waiters {
		row(fmt.Sprintf("waiter %d", i+1), "%s", quote(waiter))
	}
	return w.Flush()
}

// printJSON prints v for programs.
func (a *app) printJSON(v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = a.out.Write(append(plainJSON(text), '\n'))
	return err
}

// isTerminal reports whether f is a terminal.
func isTerminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}
