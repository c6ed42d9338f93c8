package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// inspectFlags are the flags of hasp inspect.
type inspectFlags struct {
	asJSON bool
	check  bool
	slots  int // 0 without --slots
}

func (a *app) inspectCommand() *cobra.Command {
	var f inspectFlags
	cmd := &cobra.Command{
		Use:   "inspect KEY",
		Short: "Show who holds a key, and, if stored, since when and who waits",
		Long: `inspect shows what the store knows about KEY: its holder, since when the holder
has it, how much of the term is left, the fence, and the waiters in order. Not
every strategy stores all of these. An owner is a label for people; hasp run
uses HOST/PID/hasp run COMMAND.

Any value that is stored under KEY counts as a hold. If the strategy did not
write that value, inspect says so, and with --json "foreign" is true. Such a value
belongs to another strategy, another library, or an application.

A slot is a key of its own: KEY#0, KEY#1 and so on. If KEY is free, inspect also
shows which slots of it are held. The store does not know how many slots KEY has:
with --slots N, inspect shows how many of the N are held.

The exit code is 0 whether or not the key is held. With --json, "held" says so. With
--check, inspect prints nothing, and the exit code is 0 if the key or all of its
slots are held, and 1 if a caller could get it.`,
		Example: `  hasp inspect backup
  hasp inspect backup --check && echo "backup runs"
  hasp inspect backup --json --url spinlock+redis://localhost:6379`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.slots < 0 || f.slots > maxSlots {
				return usagef("--slots %d: want 1 to %d", f.slots, maxSlots)
			}
			return a.withClient(cmd, func(ctx context.Context, client *hasp.Client) error {
				return a.inspect(ctx, client, args[0], f)
			})
		},
	}

	cmd.Flags().BoolVar(&f.asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&f.check, "check", false,
		"print nothing, and exit with 0 if KEY is held, and 1 if it is free")
	cmd.Flags().IntVar(&f.slots, "slots", 0, "the number of slots that KEY has, as with hasp run")
	cmd.MarkFlagsMutuallyExclusive("json", "check")
	return cmd
}

// inspect prints what the store knows of key. With --check it only sets the exit code.
func (a *app) inspect(
	ctx context.Context, client *hasp.Client, key string, f inspectFlags,
) error {
	status, err := client.Inspect(ctx, key)
	if err != nil {
		return err
	}

	// Without --slots, look for the slots only to show them, and only if the key is free, because a
	// key that is held by itself has no slots.
	var slots map[int]hasp.Status
	isShown := !status.Held && !f.check
	if f.slots > 0 || isShown {
		slots, err = heldSlots(ctx, client, key, cmp.Or(f.slots, maxSlots))
	}
	if err != nil && f.slots > 0 { // without --slots, leave out slots without an answer
		return err
	}

	switch {
	case f.check:
		isHeld := status.Held
		if f.slots > 0 {
			isHeld = len(slots) == f.slots // otherwise a caller could get one of them
		}
		if !isHeld {
			a.code = exitFailed
		}
		return nil
	case f.asJSON:
		return a.printEntry("  ", key, status, slots)
	}
	return printStatus(a.out, key, status, slots, f.slots)
}

// maxSlots is the largest number of slots that WithSlots allows.
const maxSlots = 100

// heldSlots returns those of the first n slots of key that are held. If the store does not answer
// for some of them, it returns the other ones and an error.
func heldSlots(
	ctx context.Context, client *hasp.Client, key string, n int,
) (held map[int]hasp.Status, firstErr error) {
	held = map[int]hasp.Status{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			s, err := client.Inspect(ctx, key+"#"+strconv.Itoa(i))
			mu.Lock()
			defer mu.Unlock()
			firstErr = cmp.Or(firstErr, err)
			if s.Held {
				held[i] = s
			}
		})
	}

	wg.Wait()
	return held, firstErr
}

// printStatus prints s and the held slots for people. The argument n is the number of slots, or 0
// if that number is not known.
func printStatus(out io.Writer, key string, s hasp.Status, slots map[int]hasp.Status, n int) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	row := func(name, value string) { fmt.Fprintf(w, "%s\t%s\n", name, value) }

	row("key", text.Quote(key))
	fenceName := "fence"
	if s.Held {
		printHold(row, s)
	} else {
		row("state", "free")
		fenceName = "last fence"
	}

	if len(slots) > 0 || n > 0 {
		ofAll := ""
		if n > 0 {
			ofAll = fmt.Sprintf(" of %d", n)
		}
		row("slots", fmt.Sprintf("%d%s held", len(slots), ofAll))
		for _, i := range slices.Sorted(maps.Keys(slots)) {
			row(fmt.Sprintf("slot %d", i), text.Plain(refusal(slots[i]).Error()))
		}
	}

	if s.Fence != 0 {
		row(fenceName, strconv.FormatUint(s.Fence, 10))
	}

	for i, waiter := range s.Waiters {
		row(fmt.Sprintf("waiter %d", i+1), text.Quote(waiter))
	}
	return w.Flush()
}

// printHold prints the rows about the hold in s. The function row prints one row.
func printHold(row func(name, value string), s hasp.Status) {
	state := "held"
	if s.Kept {
		state = "kept by a min hold, after the owner has unlocked"
	}
	row("state", state)
	if ui.Foreign(s) {
		row("value", "not a record of this strategy: "+
			"of another strategy, another library, or an application")
	}

	if s.Owner != "" {
		row("owner", text.Quote(s.Owner))
	}
	for i, owner := range s.Shared {
		row(fmt.Sprintf("shared by %d", i+1), text.Quote(owner))
	}

	if !s.Since.IsZero() {
		ago := text.Duration(time.Since(s.Since))
		row("since", s.Since.Format(time.RFC3339)+" ("+ago+" ago)")
	}
	switch {
	case s.TTL < 0:
		row("term", "without an end")
	case s.Kept:
		row("term", text.Duration(s.TTL)+" left")
	default:
		row("term", text.Duration(s.TTL)+" left, unless it is renewed")
	}
}

// printJSON prints v in ASCII. If indent is empty, v takes one line.
func (a *app) printJSON(indent string, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", indent)
	err := e.Encode(v)
	if err == nil {
		_, err = a.out.Write(text.JSON(b.Bytes()))
	}
	return err
}

// printEntry prints what is known of a key as JSON, with indent as in printJSON. If slots is empty,
// the JSON does not have it.
func (a *app) printEntry(indent, key string, s hasp.Status, slots map[int]hasp.Status) error {
	var raw []byte
	if !utf8.ValidString(key) {
		raw = []byte(key)
	}
	return a.printJSON(indent, struct {
		Key     string `json:"key"`
		Raw     []byte `json:"key_base64,omitempty"` // the key, if it is not UTF-8, because JSON cannot contain it
		Foreign bool   `json:"foreign,omitempty"`
		hasp.Status
		Slots map[int]hasp.Status `json:"slots,omitempty"`
	}{key, raw, ui.Foreign(s), s, slots})
}
