// Package redisfence guards keys of a Redis by a fence; see package fence.
package redisfence

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/fence"
)

// Do runs the commands that the function write adds to p, in one transaction. If a larger fence
// than the one of ctx was seen, the error is a [*fence.StaleError], and no command runs.
//
// fenceKey is the key in which Redis keeps the largest fence, such as "{account/7}:fence". It must
// not be evicted. On a Cluster, all keys of the commands must be in the slot of fenceKey.
//
// Do watches fenceKey, reads it, and sends the commands in a MULTI: three round trips on a
// connection of its own. If another holder raises the fence meanwhile, Do begins again, and calls
// write again. The commands have their results when Do returns. If a command fails, Do returns the
// error of the command, but Redis has run the others.
func Do(ctx context.Context, rdb redis.UniversalClient, fenceKey string, write func(p redis.Pipeliner) error) error {
	f, err := fence.Of(ctx)
	if err != nil {
		return err
	}

	for {
		err := rdb.Watch(ctx, func(tx *redis.Tx) error {
			seen, err := tx.Get(ctx, fenceKey).Uint64()
			switch {
			case errors.Is(err, strconv.ErrSyntax), errors.Is(err, strconv.ErrRange):
				return fmt.Errorf("redisfence: the value of %q is no fence: %w", fenceKey, err)
			case err != nil && !errors.Is(err, redis.Nil):
				return err
			}

			if err := fence.Compare(fenceKey, f, seen); err != nil {
				return err
			}
			_, err = tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
				// Set the key only if that raises the fence. Otherwise other writes of this holder
				// would begin again for nothing.
				if f > seen {
					p.Set(ctx, fenceKey, f, 0)
				}
				return write(p)
			})
			return err
		}, fenceKey)

		if !errors.Is(err, redis.TxFailedErr) {
			return err
		}
	}
}
