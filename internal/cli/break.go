package cli

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

func (a *app) breakCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "break KEY",
		Short: "Free a key while another program holds it (dangerous)",
		Long: `break frees KEY, whichever program holds it. The holder learns of it at its next
renewal. Until then it works as if it held the lock, and the next holder may
already work at the same time. So make sure first that the holder has ended.

A holder that has died needs no break: its key is free when its term is over.

On a terminal break asks for confirmation. Elsewhere it requires --force. If the
value under KEY is not a record of the strategy, break always requires --force,
because it would delete data that may not be a lock.`,
		Example: `  hasp inspect backup
  hasp break backup`,
		// Function root sets Args, which checks the number of the arguments by Use.
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(cmd, func(ctx context.Context, client *hasp.Client) error {
				return a.breakKey(ctx, client, args[0], force)
			})
		},
	}

	cmd.Flags().BoolVarP(&force, "force", "f", false, "do not ask")
	return cmd
}

// breakKey frees the key, if it is held. Without force it asks the user first, and refuses to free
// a value that is not a record of the strategy.
func (a *app) breakKey(ctx context.Context, client *hasp.Client, key string, force bool) error {
	before, err := client.Inspect(ctx, key)
	if err != nil && !force { // --force also frees a record that cannot be read
		return err
	}
	if err == nil && !before.Held { // after an error, before says nothing
		fmt.Fprintf(a.out, "%s is free (hasp inspect shows its slots, if it has any)\n", text.Quote(key))
		return nil
	}

	if !force {
		if ui.Foreign(before) {
			return usagef("%s holds a value that is not a record of this strategy: "+
				"it may be data of an application, or a lock of another strategy or library; "+
				"--force deletes it", text.Quote(key))
		}

		if err := a.confirm(ctx, key, before); err != nil {
			return err
		}

		// Inspect again. The user's answer is about the holder in the question, and another caller
		// may hold the key by now.
		now, err := client.Inspect(ctx, key)
		if err != nil {
			return err
		}
		if !ui.SameHold(before, now) {
			return fmt.Errorf("%s has changed hands since the question, and was not broken",
				text.Quote(key))
		}
	}

	if err := client.Break(ctx, key); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "broke %s; the holder's work may still be running\n", text.Quote(key))
	return nil
}

// confirm asks the user whether to break key, whose hold is s. It returns an error unless the user
// says yes. If stdin is not a terminal, it asks nothing.
func (a *app) confirm(ctx context.Context, key string, s hasp.Status) error {
	held := fmt.Sprintf("%s is %v", text.Quote(key), refusal(s))
	in, isFile := a.in.(*os.File)
	isTerminal := isFile && term.IsTerminal(int(in.Fd()))
	if !isTerminal {
		return usagef("%s, and the holder's work may still be running; "+
			"--force breaks it without a question", held)
	}

	fmt.Fprintf(a.err, "%s.\n"+
		"If the holder still works, the next holder will work at the same time.\n"+
		"Break it? [y/N] ", text.Plain(held))
	line, err := unlessEnded(ctx, func() string {
		line, _ := bufio.NewReader(a.in).ReadString('\n')
		return strings.ToLower(strings.TrimSpace(line))
	})
	switch {
	case err != nil:
		fmt.Fprintln(a.err) // end the line of the question
		return err
	case line != "y" && line != "yes":
		return fmt.Errorf("%s was not broken", text.Quote(key))
	}

	return nil
}
