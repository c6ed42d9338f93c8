package cli

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
)

func (a *app) lockCommand() *cobra.Command {
	r := run{app: a}
	cmd := &cobra.Command{
		Use:   "lock KEY --ttl DURATION",
		Short: "Take a key for several commands, and print a handle for hasp unlock",
		Long: `lock waits until it holds KEY, and prints a handle. KEY stays taken for --ttl after
that, although hasp has ended, and no program renews it. On any host with the same
store and strategy, "hasp renew" gives it another --ttl, and "hasp unlock" frees it.

The handle is one line of JSON, and a secret: any program that has it can free KEY.
Keep it in a file that only you can read, and pass it on stdin, because other users
can read the arguments of a program.

Prefer "hasp run" if one command does the work: it renews the lock, ends the command
if the lock is lost, and frees KEY if the command fails.

The exit code is 75 if another program holds KEY. With renew and unlock it is 79 if
the lock was lost: another program may have held KEY since.`,
		Example: `  umask 077
  handle=$(hasp lock deploy --ttl 30m) && echo "$handle" >deploy.lock
  hasp renew - <deploy.lock && ./migrate
  hasp unlock - <deploy.lock`,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.key = args[0]
			r.goal = text.Quote(r.key)
			if !cmd.Flag("ttl").Changed {
				return usagef("give --ttl: how long the key stays taken " +
					"if it is neither renewed nor unlocked")
			}
			if !utf8.ValidString(r.key) {
				return usagef("KEY is not UTF-8, so a handle cannot contain it")
			}

			client, err := a.open(cmd, cmd.CommandPath(), r.observe)
			if err != nil {
				return err
			}
			defer client.Close()

			// The method open has only warned about memlock. Here it is an error, because the lock
			// is useless.
			if describe(a.strategy).Reach == backend.Process {
				return usagef("%s keeps locks inside this process, "+
					"so no other command can unlock them", a.strategy)
			}

			lease, err := r.acquire(cmd.Context(), client, r.options(cmd))
			if err != nil {
				return err
			}
			return r.handOut(cmd.Context(), client, lease)
		},
	}

	r.waitFlags(cmd)
	for name, usage := range map[string]string{
		"ttl":      "how long KEY stays taken if it is neither renewed nor unlocked",
		"fence":    "put a fence into the handle, and fail if the strategy has no fences",
		"slots":    "let this many callers hold KEY at once",
		"max-hold": "hold KEY for this long at most, however often it is renewed",
		"min-hold": "keep KEY taken for this long after it was acquired, even if it is unlocked sooner",
	} {
		cmd.Flag(name).Usage = usage
	}
	return cmd
}

// handOut detaches the lease and prints its handle. If the print fails, handOut frees the key,
// because no program has the handle.
func (r *run) handOut(ctx context.Context, client *hasp.Client, lease *hasp.Lease) error {
	// Catch SIGPIPE. Otherwise a print that fails would end hasp, and the key would stay taken.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)

	handle, err := lease.Detach(ctx, r.ttl)
	if err != nil {
		_ = lease.Unlock(ctx)
		return err
	}

	printErr := r.printJSON("", handle)
	if printErr != nil {
		// The lease ended when it was detached, so resume it first.
		if lease, err := client.Resume(context.WithoutCancel(ctx), handle); err == nil {
			_ = lease.Unlock(ctx)
		}
	}

	return printErr
}

// renewCommand returns "hasp renew". Detach extends the term and leaves the key taken. The user's
// handle stays valid, because its token does not change.
func (a *app) renewCommand() *cobra.Command {
	cmd := a.handleCommand("renew", "Keep a key taken that hasp lock has taken",
		func(ctx context.Context, lease *hasp.Lease, handle hasp.Handle) error {
			_, err := lease.Detach(ctx, handle.TTL)
			return err
		})
	cmd.Flags().Var(new(duration), "ttl",
		"how long KEY stays taken from now on, at least (default: as with hasp lock)")
	return cmd
}

func (a *app) unlockCommand() *cobra.Command {
	return a.handleCommand("unlock", "Free a key that hasp lock has taken",
		func(ctx context.Context, lease *hasp.Lease, _ hasp.Handle) error { return lease.Unlock(ctx) })
}

// handleCommand returns a command that resumes the lease of a handle, and calls f with both. The
// lease is not renewed.
func (a *app) handleCommand(
	name, short string, f func(context.Context, *hasp.Lease, hasp.Handle) error,
) *cobra.Command {
	return &cobra.Command{
		Use:   name + " HANDLE|-",
		Short: short,
		Long: short + `. The argument is the handle
that "hasp lock" has printed, or -, which reads it from stdin. The exit code is 79 if
the lock was lost. "hasp lock --help" has an example.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			handle, err := a.readHandle(cmd.Context(), args[0])
			if err != nil {
				return err
			}

			// Refuse a term that is too long before Resume. A Detach that is refused would leave a
			// lease that is neither renewed nor unlocked, and Close would wait for it.
			if ttl := cmd.Flag("ttl"); ttl != nil { // hasp renew
				if ttl.Changed {
					handle.TTL = time.Duration(*ttl.Value.(*duration))
				}
				if left := time.Until(handle.MaxHold); 0 < left && left < handle.TTL {
					return usagef("the max hold of %s ends in %s: give a shorter --ttl",
						text.Quote(handle.Key), text.Duration(left))
				}
			}

			err = a.withClient(cmd, func(ctx context.Context, client *hasp.Client) error {
				lease, err := client.Resume(ctx, handle, hasp.WithoutRenewal())
				if err != nil {
					return err
				}
				return f(ctx, lease, handle)
			})
			var refused *hasp.Error
			if errors.As(err, &refused) {
				refused.Op = name // instead of "resume" or "detach"
			}
			return err
		},
	}
}

// readHandle returns the handle in arg, or the handle that it reads from stdin if arg is "-". It
// returns early if ctx ends.
func (a *app) readHandle(ctx context.Context, arg string) (handle hasp.Handle, err error) {
	line := arg
	if arg == "-" {
		line, err = unlessEnded(ctx, func() string {
			b, _ := io.ReadAll(io.LimitReader(a.in, 1<<16)) // after an error, b is no handle
			return string(b)
		})
		if err != nil {
			return handle, err
		}
	}

	if json.Unmarshal([]byte(strings.TrimSpace(line)), &handle) != nil {
		// Do not show the text, which may be secret.
		return handle, usagef("this is not a handle that hasp lock has printed; " +
			"to read it from a file, pass - <FILE; if it is empty, hasp lock has failed")
	}
	return handle, nil
}
