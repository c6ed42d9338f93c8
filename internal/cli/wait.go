package cli

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// noticeAfter is how long hasp waits for a key before it prints that it waits.
const noticeAfter = time.Second

// acquire waits for the key. If it waits for longer than noticeAfter, it prints that it waits, and
// in the end how long it has waited.
func (r *run) acquire(ctx context.Context, client *hasp.Client, opts []hasp.Option) (*hasp.Lease, error) {
	if err := r.refuseNested(ctx, client); err != nil {
		return nil, err
	}

	began := time.Now()
	waiting, done := context.WithCancel(ctx)
	defer done()
	said := make(chan bool, 1)
	notice := time.AfterFunc(noticeAfter, func() { said <- r.sayWaiting(waiting, client) })

	lease, err := client.Lock(ctx, r.key, opts...)

	// If the notice is being printed, wait until it is complete, so that it is not mixed with
	// another line.
	done()
	if !notice.Stop() && <-said && err == nil {
		r.complain("got %s after %s", text.Quote(r.key), text.Duration(time.Since(began)))
	}
	if r.shared && errors.Is(err, errors.ErrUnsupported) {
		return nil, usagef("--shared: this strategy has no shared locks")
	}
	if !errors.Is(err, hasp.ErrHeld) {
		return lease, err
	}

	held, within := &hasp.HeldError{}, ""
	errors.As(err, &held) // if the store names the holder, the variable held contains it
	if r.wait > 0 {
		within = " and was not free within " + text.Duration(r.wait)
	}
	return nil, codeError{exitNotAcquired, fmt.Errorf("%s is %v%s%s", text.Quote(r.key), held, within, r.notRun())}
}

// notRun returns the end of an error text. If there is a command, it says that hasp did not run it.
func (r *run) notRun() string {
	if r.argv == nil {
		return ""
	}
	return "; the command was not run"
}

// sayWaiting prints that hasp waits. If the store names the holder, it prints the holder as well.
// If ctx ends first, it prints nothing and returns false.
func (r *run) sayWaiting(ctx context.Context, client *hasp.Client) bool {
	if r.slots > 0 {
		// Each slot has a holder of its own.
		r.complain("waiting for one of the %v slots of %s", r.slots, text.Quote(r.key))
		return true
	}

	s, _ := client.Inspect(ctx, r.key) // in an outage s is empty, and the notice names no holder
	if ctx.Err() != nil {
		return false
	}
	by := ""
	switch {
	case ui.Foreign(s):
		by = ", which has a value that is not a lock of this strategy; see hasp inspect"
	case s.Owner != "":
		by = ", held by " + text.Quote(s.Owner)
	}
	r.complain("waiting for %s%s", text.Quote(r.key), by)
	return true
}

// These environment variables are set for the command of hasp run.
const (
	keyEnv   = "HASP_KEY="
	fenceEnv = "HASP_FENCE="
	slotEnv  = "HASP_SLOT="

	// heldEnv contains, as the query of a URL, the key and the owner of this lock and of each lock
	// of an outer hasp run. A hasp run inside the command reads it.
	heldEnv = "HASP_HELD="
)

// environment returns env with the variables for lease. They replace the variables of an outer hasp
// run, except that HASP_HELD keeps the outer locks.
func (r *run) environment(env []string, lease *hasp.Lease) []string {
	held := heldAround()
	held.Add(lease.Key(), r.owner)

	env = slices.DeleteFunc(env, func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{keyEnv, fenceEnv, slotEnv, heldEnv}, name+"=")
	})
	env = append(env, keyEnv+lease.Key(), heldEnv+held.Encode())
	if fence := lease.Fence(); fence != 0 {
		env = append(env, fenceEnv+strconv.FormatUint(fence, 10))
	}
	if r.slots > 0 {
		env = append(env, slotEnv+strconv.Itoa(lease.Slot()))
	}
	return env
}

// heldAround returns the locks of the outer hasp runs, inside which this process runs. It maps each
// key to the owners.
func heldAround() url.Values {
	held, _ := url.ParseQuery(os.Getenv(strings.TrimSuffix(heldEnv, "=")))
	return held
}

// refuseNested returns an error if the outer hasp runs hold the key, or all of its slots. The outer
// runs wait until this process ends, so this process must not wait for them.
//
// The environment alone does not prove that they hold the key. A process in the background keeps
// its environment after the lock was released. The lock may also be in another store. So
// refuseNested asks the store for the owners.
func (r *run) refuseNested(ctx context.Context, client *hasp.Client) error {
	owners := heldAround()[r.key]
	if len(owners) == 0 {
		return nil
	}

	owner := ""
	for i := range max(r.slots, 1) {
		key := r.key
		if r.slots > 0 {
			key += "#" + strconv.Itoa(i)
		}
		s, err := client.Inspect(ctx, key)
		if err != nil || !s.Held {
			return nil
		}
		// Refuse even if both runs are shared. A writer may have begun to wait after the outer run
		// got the key, and would keep this run out.
		holders := append(s.Shared, s.Owner)
		at := slices.IndexFunc(holders, func(h string) bool { return slices.Contains(owners, h) })
		if at < 0 {
			return nil
		}
		owner = holders[at]
	}
	return codeError{exitNotAcquired, fmt.Errorf("%s is held by %s, the hasp run that this one runs inside: "+
		"each would wait for the other to end%s", text.Quote(r.key), text.Quote(owner), r.notRun())}
}
