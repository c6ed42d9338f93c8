package main

import (
	"bufio"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func (a *app) breakCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "break KEY",
		Short: "Free a key whoever holds it (dangerous)",
		Long: `break frees KEY, whoever holds it. The holder is not asked: it hears of it at
its next renewal, and until then works as if it held the lock, while the next
one already does. Make sure first that the holder has ended. A holder that is
dead needs no break: its key is free when its term has run out.

On a terminal it asks before it does so; elsewhere it wants --force.`,
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(cmd, "hasp break", func(ctx context.Context, client *hasp.Client) error {
				return a.breakKey(ctx, client, args[0], force)
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "do not ask")
	return cmd
}

// breakKey breaks key if somebody holds it, and asks before it does so.
func (a *app) breakKey(ctx context.Context, client *hasp.Client, key string, force bool) error {
	before, err := client.Inspect(ctx, key)
	if err != nil && !force { // what cannot be read can be broken all the same
		return err
	}
	if err == nil && !before.Held {
		fmt.Fprintf(a.out, "nobody holds %s\n", quote(key))
		return nil
	}
	if !force {
		if err := a.confirm(ctx, key, before); err != nil {
			return err
		}
		// A person takes time to answer, and means the holder they were told of.
		now, err := client.Inspect(ctx, key)
		if err != nil {
			return err
		}
		if !sameHold(before, now) {
			return codeError{exitFailed, fmt.Errorf("%s has changed hands meanwhile and was not broken", quote(key))}
		}
	}
	if err := client.Break(ctx, key); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "broke %s; the holder's work may still be running\n", quote(key))
	return nil
}

// confirm asks a person whether to break key.
func (a *app) confirm(ctx context.Context, key string, s backend.Status) error {
	by := "somebody"
	if s.Owner != "" {
		by = quote(s.Owner)
	}
	if !isTerminal(a.in) {
		return usagef("%s is held by %s, whose work may still be running; --force breaks it all the same", quote(key), by)
	}
	fmt.Fprintf(a.err, "%s is held by %s.\nIf its work still runs, breaking the key lets a second one in beside it.\nBreak it? [y/N] ", quote(key), by)
	answer := make(chan string, 1)
	go func() { // left behind if a signal ends the wait, and then the program
		text, _ := bufio.NewReader(a.in).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(text))
	}()
	select {
	case text := <-answer:
		if text == "y" || text == "yes" {
			return nil
		}
		return codeError{exitFailed, fmt.Errorf("%s was not broken", quote(key))}
	case <-ctx.Done():
		fmt.Fprintln(a.err)
		return ctx.Err()
	}
}

// sameHold reports whether two looks at a key saw the same hold, as far as
// the store can tell holds apart.
func sameHold(a, b backend.Status) bool {
	return a.Held == b.Held && a.Owner == b.Owner && a.Since.Equal(b.Since) && a.Fence == b.Fence
}
