package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// ls is a call of hasp ls: its flags and its output.
type ls struct {
	out     io.Writer
	prefix  string
	json    bool
	sort    string
	waiting bool
	watch   bool
	every   time.Duration
	size    func() (width, height int) // the size of the terminal; nil if out is not a terminal
	drawn   int                        // how many lines the last table on the terminal has
	warn    func(format string, args ...any)
}

func (a *app) lsCommand() *cobra.Command {
	l := &ls{out: a.out, warn: a.complain}
	cmd := &cobra.Command{
		Use:   "ls [PREFIX]",
		Short: "List the keys that are held, with their holders",
		Long: `ls lists the keys that are held or waited for, and begin with PREFIX: the owner,
for how long it has had the key, how much of the term is left, the fence, and
how many callers wait. A dash stands for what the strategy does not store. In a
network only fairlock and etcdlock store who waits, so --waiting lists nothing
with others. Each
slot is a key of its own: KEY#0, KEY#1 and so on. While a caller waits for a slot,
KEY#queue is listed too.

ls lists only locks in the form that this strategy writes. For a key that another
program holds, use "hasp inspect". On a Redis, ls reads the names of
all keys, a few hundred at a time, with rests in between. So the list is no
snapshot.

On a terminal, ls shortens keys and owners to fit. With --watch it draws the
table again and again. Elsewhere it appends the new rows to the old ones, each
with the time. If the store cannot be reached meanwhile, it says so and goes on.`,
		Example: `  hasp ls
  hasp ls mail: --sort age
  hasp ls --waiting --watch --url fairlock+redis://localhost:6379
  hasp ls --json | jq -r 'select(.waiters | length > 9) | .key'`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l.prefix = strings.Join(args, "") // there is at most one argument
			if !slices.Contains(orders, l.sort) {
				return usagef("--sort %s: want %s", text.Quote(l.sort), strings.Join(orders, ", "))
			}
			if cmd.Flags().Changed("every") && !l.watch {
				return usagef("--every is for --watch")
			}
			if l.every < minEvery {
				return usagef("--every %v: want %v or more", l.every, minEvery)
			}
			if isTerminal(a.out) {
				l.size = func() (int, int) { return sizeOf(a.out.(*os.File)) }
			}
			return a.withClient(cmd, l.run)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&l.json, "json", false, "print JSON, an object on each line")
	f.StringVar(&l.sort, "sort", orders[0], "order of the keys: `ORDER` is "+strings.Join(orders, ", ")+"; the oldest hold or the most waiters come first")
	f.BoolVar(&l.waiting, "waiting", false, "list only keys that callers wait for")
	f.BoolVar(&l.watch, "watch", false, "list again and again")
	f.DurationVar(&l.every, "every", 2*time.Second, "rest between two lists of --watch")
	return cmd
}

// orders are the values of --sort.
var orders = []string{"key", "age", "waiters"}

const minEvery = 100 * time.Millisecond

// sizeOf returns the size of a terminal. If the size is not known, it returns 80 by 24.
func sizeOf(f *os.File) (width, height int) {
	width, height, err := term.GetSize(int(f.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		return 80, 24
	}
	return width, height
}

// run lists once. With --watch it lists until ctx ends.
func (l *ls) run(ctx context.Context, client *hasp.Client) error {
	first, outage := true, false
	for {
		all, err := l.list(ctx, client)
		switch {
		case err == nil:
			if err := printed(l.print(all, time.Now(), first)); err != nil || !l.watch {
				return err
			}
			if outage {
				l.warn("the store answers again")
			}
			first, outage = false, false
		case first || !errors.Is(err, hasp.ErrUnavailable):
			return err
		case !outage:
			outage, l.drawn = true, 0 // so the next table is below the warning
			l.warn("%v; --watch goes on", err)
		}
		select {
		case <-time.After(l.every):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// list returns the entries in the order of --sort. If List yields a key twice, it returns the last
// entry of the key.
func (l *ls) list(ctx context.Context, client *hasp.Client) ([]hasp.Entry, error) {
	byKey := map[string]hasp.Entry{}
	for e, err := range client.List(ctx, l.prefix) {
		if err != nil {
			return nil, err
		}
		if !l.waiting || len(e.Waiters) > 0 {
			byKey[e.Key] = e
		}
	}

	all := make([]hasp.Entry, 0, len(byKey))
	for _, e := range byKey {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b hasp.Entry) int {
		order := 0
		switch l.sort {
		case "age":
			order = cmp.Or(cmp.Compare(unknown(a), unknown(b)), a.Since.Compare(b.Since))
		case "waiters":
			order = cmp.Compare(len(b.Waiters), len(a.Waiters))
		}
		return cmp.Or(order, cmp.Compare(a.Key, b.Key))
	})
	return all, nil
}

// unknown returns 1 if Since is not known, and otherwise 0, for a sort that puts such entries last.
func unknown(e hasp.Entry) int {
	if e.Since.IsZero() {
		return 1
	}
	return 0
}

func (l *ls) print(all []hasp.Entry, now time.Time, first bool) error {
	width, stamp := 0, ""
	switch {
	case l.json:
		return l.printJSON(all, now)
	case l.size != nil && l.watch:
		return l.draw(all, now)
	case l.size != nil:
		width, _ = l.size()
	case l.watch:
		stamp = now.Format(time.TimeOnly)
	}
	lines := table(all, now, stamp, width, first)
	if len(lines) == 0 {
		return nil
	}
	_, err := io.WriteString(l.out, strings.Join(lines, "\n")+"\n")
	return err
}

func (l *ls) printJSON(all []hasp.Entry, now time.Time) error {
	if !l.watch {
		now = time.Time{}
	}
	for _, e := range all {
		b, err := json.Marshal(struct {
			At time.Time `json:"at,omitzero"` // the time of the list, with --watch
			hasp.Entry
		}{now, e})
		if err != nil {
			return err
		}
		if _, err := l.out.Write(append(text.JSON(b), '\n')); err != nil {
			return err
		}
	}
	return nil
}

// draw draws the table over the last table, with as many rows as the terminal has room for.
func (l *ls) draw(all []hasp.Entry, now time.Time) error {
	width, height := l.size()
	head := fmt.Sprintf("%s  %s", now.Format(time.TimeOnly), text.Count(len(all), "key", "keys"))
	room := max(height-3, 1) // 3 lines for the head, the column names and the cursor
	if len(all) > room {
		all = all[:max(room-1, 1)]
		head += fmt.Sprintf(", the first %d shown", len(all))
	}
	lines := append([]string{head}, table(all, now, "", width, true)...)

	var b strings.Builder
	if l.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", l.drawn)
	}
	for _, line := range lines {
		// Cut the line, because a narrow terminal would wrap it.
		fmt.Fprintf(&b, "\r%s\x1b[K\n", line[:min(len(line), width)])
	}
	b.WriteString("\x1b[J")
	l.drawn = len(lines)
	_, err := io.WriteString(l.out, b.String())
	return err
}

const gap = "  "

// minCell is the shortest width to which a key or an owner is cut.
const minCell = 8

// table returns the lines of a table. Each row begins with stamp. If width is not 0, keys and
// owners are cut so that the lines fit. All cells are printable ASCII.
func table(all []hasp.Entry, now time.Time, stamp string, width int, names bool) (lines []string) {
	rows := [][]string{{"KEY", "OWNER", "AGE", "LEFT", "FENCE", "WAITERS"}}
	for _, e := range all {
		rows = append(rows, []string{label(e.Key), holder(e), age(e, now), left(e), number(e.Fence), number(uint64(len(e.Waiters)))})
	}

	widths := make([]int, len(rows[0]))
	total := (len(widths) - 1) * len(gap)
	for i := range widths {
		for _, r := range rows {
			widths[i] = max(widths[i], len(r[i]))
		}
		total += widths[i]
	}
	if total > width && width > 0 {
		room := width - (total - widths[0] - widths[1])
		half := max(room/2, minCell)
		switch {
		case widths[0] <= half:
			widths[1] = max(room-widths[0], minCell)
		case widths[1] <= half:
			widths[0] = max(room-widths[1], minCell)
		default:
			widths[0], widths[1] = half, max(room-half, minCell)
		}
	}

	for i, r := range rows {
		if i == 0 && !names {
			continue
		}
		var cells []string
		if stamp != "" {
			cells = append(cells, stamp)
			if i == 0 {
				cells[0] = fmt.Sprintf("%-*s", len(stamp), "TIME")
			}
		}
		for j, cell := range r {
			pad := widths[j]
			if j < 2 {
				pad = -pad // aligned to the left
			}
			cells = append(cells, fmt.Sprintf("%*s", pad, shorten(cell, widths[j])))
		}
		lines = append(lines, strings.Join(cells, gap))
	}
	return lines
}

// If a cell is too long, shorten cuts out its middle. It keeps the end, which may be the number of
// a slot.
func shorten(cell string, width int) string {
	if len(cell) <= width {
		return cell
	}
	const dots = ".."
	end := (width - len(dots)) / 3
	return cell[:width-len(dots)-end] + dots + cell[len(cell)-end:]
}

func label(s string) string { return text.Label(s, '~') }

// holder returns the owner, or the owners of shared holds.
func holder(e hasp.Entry) string {
	switch {
	case !e.Held:
		return "(free)"
	case len(e.Shared) > 0:
		owners := make([]string, len(e.Shared))
		for i, o := range e.Shared {
			owners[i] = label(o)
		}
		slices.Sort(owners)
		return fmt.Sprintf("(%d shared) %s", len(owners), strings.Join(owners, ", "))
	case ui.Foreign(e.Status):
		return "(not of this strategy)"
	}
	return label(e.Owner)
}

func age(e hasp.Entry, now time.Time) string {
	if !e.Held || e.Since.IsZero() {
		return "-"
	}
	return seconds(now.Sub(e.Since))
}

func left(e hasp.Entry) string {
	switch {
	case !e.Held:
		return "-"
	case e.TTL < 0:
		return "no end"
	}
	return seconds(e.TTL)
}

// seconds returns a duration as a cell, such as 0.4s, 12s or 3m5s.
func seconds(d time.Duration) string {
	if d = max(d, 0); d < 10*time.Second {
		return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) + "s"
	}
	return text.Duration(d.Round(time.Second))
}

func number(n uint64) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatUint(n, 10)
}
