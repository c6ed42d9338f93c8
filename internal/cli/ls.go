package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

func (a *app) lsCommand() *cobra.Command {
	var asJSON, waiting bool
	cmd := &cobra.Command{
		Use:   "ls [PREFIX]",
		Short: "List the keys that are held, with their holders",
		Long: `ls lists the keys that are held or waited for, and begin with PREFIX: the owner,
for how long it has had the key, how much of the term is left, the fence, and
how many callers wait. A dash stands for what the strategy does not store. In a
network only fairlock and etcdlock store who waits, so --waiting lists nothing
with others. Each
slot is a key of its own: KEY#0, KEY#1 and so on. While a caller waits for a slot,
KEY#queue is listed too. Long keys and owners are cut, and of a shared key three
owners are shown. With --json nothing is cut, and a key that is not UTF-8 is added
as key_base64.

ls lists only locks in the form that this strategy writes. For a key that another
program holds, use "hasp inspect". On a Redis, ls reads the names of
all keys, a few hundred at a time, with rests in between. So the list is no
snapshot.

To follow the locks, use "watch hasp ls" or "hasp ui".`,
		Example: `  hasp ls
  hasp ls mail:
  hasp ls --waiting --url fairlock+redis://localhost:6379
  hasp ls --json | jq -r 'select(.waiters | length > 9) | .key'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix := strings.Join(args, "") // there is at most one argument
			if strings.Contains(prefix, "*") {
				a.complain("warning: ls takes a prefix, not a pattern: leave out the *")
			}
			return a.withClient(cmd, func(ctx context.Context, client *hasp.Client) error {
				entries, err := list(ctx, client, prefix, waiting)
				if err != nil {
					return err
				}
				if asJSON {
					return a.printLines(entries)
				}
				return table(a.out, entries, time.Now())
			})
		},
	}

	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print JSON, an object on each line")
	f.BoolVar(&waiting, "waiting", false, "list only keys that callers wait for")
	return cmd
}

// list returns the entries with the prefix in the order of their keys. If waiting is true, it
// leaves out keys that no caller waits for. If List yields a key twice, list returns the last entry
// of the key.
func list(
	ctx context.Context, client *hasp.Client, prefix string, waiting bool,
) ([]hasp.Entry, error) {
	byKey := map[string]hasp.Entry{}
	for e, err := range client.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		if !waiting || len(e.Waiters) > 0 {
			byKey[e.Key] = e
		}
	}

	return slices.SortedFunc(maps.Values(byKey), func(a, b hasp.Entry) int {
		return strings.Compare(a.Key, b.Key)
	}), nil
}

// printLines prints entries as JSON, each on its line.
func (a *app) printLines(entries []hasp.Entry) error {
	for _, e := range entries {
		if err := a.printEntry("", e.Key, e.Status, nil); err != nil {
			return err
		}
	}

	return nil
}

// table prints entries as the rows of a table. All cells are printable ASCII.
func table(out io.Writer, entries []hasp.Entry, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KEY\tOWNER\tAGE\tLEFT\tFENCE\tWAITERS")
	for _, e := range entries {
		left := text.Duration(e.TTL)
		if e.TTL < 0 {
			left = "no end"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", label(e.Key), holder(e),
			dashUnless(e.Held && !e.Since.IsZero(), text.Duration(now.Sub(e.Since))),
			dashUnless(e.Held, left),
			dashUnless(e.Fence != 0, fmt.Sprint(e.Fence)),
			dashUnless(len(e.Waiters) > 0, fmt.Sprint(len(e.Waiters))))
	}

	return w.Flush()
}

// dashUnless returns the cell if known is true, and a dash otherwise.
func dashUnless(known bool, cell string) string {
	if !known {
		return "-"
	}
	return cell
}

// label returns s as printable ASCII.
func label(s string) string { return text.Label(s, '~') }

// maxSharers is how many owners of shared holds are shown, because a column is as wide as its
// widest cell.
const maxSharers = 3

// holder returns the cell that says who holds a key: the owner, the first owners of shared holds,
// or words in parentheses.
func holder(e hasp.Entry) string {
	switch {
	case !e.Held:
		return "(free)"
	case len(e.Shared) > 0:
		owners := slices.Sorted(slices.Values(e.Shared))
		more := ""
		if len(owners) > maxSharers {
			owners = owners[:maxSharers]
			more = ", ..."
		}
		for i, o := range owners {
			owners[i] = label(o)
		}
		return fmt.Sprintf("(%d shared) %s%s", len(e.Shared), strings.Join(owners, ", "), more)
	case ui.Foreign(e.Status):
		return "(not of this strategy)"
	}

	if e.Kept {
		return label(e.Owner) + " (min hold)"
	}
	return label(e.Owner)
}
