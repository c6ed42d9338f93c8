package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/cli/job"
	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// noticeAfter is how long hasp waits for a key before it prints that it waits.
const noticeAfter = time.Second

// acquire waits for the key. If it waits for longer than noticeAfter, it prints that it waits, and
// when it has the key, how long it has waited. If another program holds the key, the error has the
// exit code exitNotAcquired.
func (r *run) acquire(
	ctx context.Context, client *hasp.Client, opts []hasp.Option,
) (*hasp.Lease, error) {
	began := time.Now()
	endWait := r.beginWait(ctx, client)
	lease, err := client.Lock(ctx, r.key, opts...)

	hasPrinted := endWait()
	if hasPrinted && err == nil {
		r.complain("got %s after %s", r.goal, text.Duration(time.Since(began)))
	}
	if r.shared && errors.Is(err, errors.ErrUnsupported) {
		return nil, usagef("--shared: this strategy has no shared locks")
	}
	if !errors.Is(err, hasp.ErrHeld) {
		return lease, err
	}

	held := &hasp.HeldError{}
	errors.As(err, &held) // the error of the store, which may name the holder, or else an empty one
	more := ""
	if held.Foreign {
		more = " (it holds a value that is no lock of this strategy: see hasp inspect)"
	}
	if r.wait > 0 {
		more += "; it was not free within " + text.Duration(r.wait)
	}
	more += r.around()
	if r.argv != nil { // hasp run, and not hasp lock
		more += "; the command was not run"
	}
	return nil, codeError{exitNotAcquired, fmt.Errorf("%s is %v%s", text.Quote(r.key), held, more)}
}

// beginWait begins a wait, which lasts until the caller calls the function end. Meanwhile, Ctrl-Z
// stops hasp. If the wait lasts for longer than noticeAfter, a notice is printed. The result of end
// says whether that was done. If the notice is being printed, end waits until it is complete, so
// that it is not mixed with another line.
func (r *run) beginWait(ctx context.Context, client *hasp.Client) (end func() bool) {
	waiting, cancel := context.WithCancel(ctx)
	go job.StopItself(waiting)
	notice := make(chan bool, 1) // whether the notice was printed
	timer := time.AfterFunc(noticeAfter, func() { notice <- r.sayWaiting(waiting, client) })

	return func() bool {
		cancel()
		isShort := timer.Stop() // the function of the timer has not begun, and will not
		if isShort {
			return false
		}
		return <-notice
	}
}

// observe prints at each EventStillWaiting how long hasp has waited. With --skip, it prints
// nothing.
func (r *run) observe(_ context.Context, e hasp.Event) {
	if r.skip || e.Kind != hasp.EventStillWaiting {
		return
	}
	why := ""
	if e.Err != nil {
		why = fmt.Sprintf(": %v", e.Err)
	}
	r.complain("still waiting for %s after %s%s", r.goal, text.Duration(e.Wait), why)
}

// sayWaiting prints that hasp waits. If the store names the holder, it prints the holder as well.
// If ctx ends first, or with --skip, it prints nothing and returns false.
func (r *run) sayWaiting(ctx context.Context, client *hasp.Client) bool {
	if r.skip {
		return false
	}
	if r.slots > 0 {
		// Each slot has a holder of its own.
		r.complain("waiting for one of the %v slots of %s", r.slots, r.goal)
		return true
	}

	s, _ := client.Inspect(ctx, r.key) // in an outage s is empty, and the notice names no holder
	if ctx.Err() != nil {
		return false
	}
	holder := ""
	switch {
	case ui.Foreign(s):
		holder = ", which has a value that is not a lock of this strategy; see hasp inspect"
	case s.Held:
		holder = fmt.Sprintf(", %v", refusal(s))
	}

	r.complain("waiting for %s%s%s", r.goal, holder, r.around())
	return true
}

// around returns a hint if a hasp run around this one has a key of the same name.
func (r *run) around() string {
	if slices.Contains(os.Environ(), keyEnv+r.key) {
		return "; if the hasp run around this command has it in this store, " +
			"the two wait for each other"
	}
	return ""
}

// refusal returns the error that a caller gets who is refused because of the hold in s. If the hold
// is shared, the error names the first owner. With refusal, all commands describe a holder in the
// same words.
func refusal(s hasp.Status) error {
	owner := s.Owner
	if len(s.Shared) > 0 {
		owner = s.Shared[0]
	}
	return &hasp.HeldError{Owner: owner, RetryAfter: max(s.TTL, 0), Kept: s.Kept}
}

// These environment variables are set for the command of hasp run. Each has its "=".
const (
	keyEnv   = "HASP_KEY="
	fenceEnv = "HASP_FENCE="
	slotEnv  = "HASP_SLOT="
)

// environment returns env with the variables for lease, and without those of an outer hasp run. It
// changes env.
func (r *run) environment(env []string, lease *hasp.Lease) []string {
	env = slices.DeleteFunc(env, func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{keyEnv, fenceEnv, slotEnv}, name+"=")
	})

	env = append(env, keyEnv+lease.Key())
	if fence := lease.Fence(); fence != 0 {
		env = append(env, fenceEnv+strconv.FormatUint(fence, 10))
	}
	if r.slots > 0 {
		env = append(env, slotEnv+strconv.Itoa(lease.Slot()))
	}
	return env
}
