package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// processClauses start this program again. If the Reach of the driver is Process, only the first
// clause applies.
var processClauses = []clause{
	{name: "reach", says: saysReach, check: reach,
		why: "Drivers that reach the host or the network exclude callers in other processes. " +
			"Drivers that reach the process do not."},
	{name: "process-exclusion", need: processes, says: saysOneHolder, check: processExclusion,
		why: "Clients in several processes hold one key one at a time."},
	{name: "process-killed-holder", need: processes, says: saysFree, check: processKilledHolder,
		why: "If a process that holds a key is killed, the key is free after its term, also for " +
			"a driver that is opened then and asks until it gets the key."},
	{name: "process-stopped-holder", need: processes, says: saysHasp, check: processStoppedHolder,
		why: "A process that was stopped past its term sees the loss at its first check. Its " +
			"renewals and its Unlock do not affect the successor."},
}

// reach asks for a held key in another process. The key must be refused there, unless the driver
// reaches only this process.
func reach(e *env) {
	c := e.open().hold(e.long)
	err := e.spawn().do("acquire", e.claimOf(c.Key, e.long))

	// A driver that claims less than it does would also fail.
	if e.traits.Reach == backend.Process {
		require(!errors.Is(err, backend.ErrHeld),
			"a key that is held is refused to another process by a driver whose Reach is Process")
		return
	}
	must(is("acquire in another process a key that is held", err, backend.ErrHeld))
}

// turns locks key the given number of times, and makes a directory while it holds key. A second
// holder at the same time cannot make that directory, so the call of turns by the second holder
// returns an error. turns also returns an error if it has not locked key so often within term.
func turns(
	ctx context.Context, c *hasp.Client, key, dir string, times int, term time.Duration,
) error {
	inside := filepath.Join(dir, "inside")
	for began := time.Now(); times > 0 && time.Since(began) < term; times-- {
		lease, err := c.Lock(ctx, key, hasp.WithTTL(term))
		if err != nil {
			return err
		}

		err = os.Mkdir(inside, 0o700)
		if errors.Is(err, fs.ErrExist) {
			return errors.New("two processes hold one key")
		}
		if err != nil {
			return err
		}
		time.Sleep(time.Millisecond) // so that other processes try to lock the key

		if err := errors.Join(os.Remove(inside), lease.Unlock(ctx)); err != nil {
			return err
		}
	}

	if times > 0 {
		return fmt.Errorf("%d turns are left after %v", times, term)
	}
	return nil
}

// processExclusion lets this process and three children take turns with one key.
func processExclusion(e *env) {
	dir, err := os.MkdirTemp("", "hasp-conformance-")
	must(err)
	e.onEnd(func() { os.RemoveAll(dir) })

	key := e.key()
	const times = 15
	children := make([]*child, 3)
	own := e.newClient()
	must(e.each(len(children), func(i int) { children[i] = e.spawn() }))

	must(e.each(len(children)+1, func(i int) {
		if i == len(children) { // the last turns are those of this process
			must(turns(e.ctx, own, key, dir, times, e.long))
			return
		}

		// Do not use the method arrives, because the request may take longer than that method
		// waits. The child ends the request itself, about a term after its start.
		must(<-children[i].begin(request{Op: "turns", Claim: e.claimOf(key, e.long), Dir: dir,
			Times: times}))
	}))
}

// processKilledHolder kills a process while it holds a key and renews the hold.
func processKilledHolder(e *env) {
	client := e.newClient()
	b := e.open()
	p := e.spawn()
	held := e.claim(e.term)
	must(p.do("lock", held))
	b.outlast(e.term)
	err := b.refused(held.Key)

	// If the key is free because the lease has ended, the renewals of the child were too slow.
	requireInTime(err == nil || p.do("err", held) == nil, "no renewal for a term of %v", e.term)
	mustf(err, "while the holder renews")

	done := e.locks(client, held.Key)
	p.Kill()
	must(e.open().grantedAtLast(held.Key)) // this driver has not seen the holder alive
	must(e.arrives("Lock of a key whose holder was killed", done))
}

// processStoppedHolder stops a process that holds a key, lets a successor take the key, and lets
// the process go on.
func processStoppedHolder(e *env) {
	b := e.open()
	p := e.spawn()
	held := e.claim(e.term)
	must(p.do("lock", held))
	mustInTime(p.do("err", held), "a lease right after Lock")
	hooked(p.Pause())

	// This attempt may fail if the process was stopped during a renewal. A longer term, as in the
	// next try, makes that less likely.
	next, err := b.seizes(held.Key, e.long)
	mustInTime(err, "a key whose holder was stopped")

	hooked(p.Resume())
	must(is("Err of a lease whose process was stopped past its term", p.do("err", held),
		hasp.ErrLost))
	must(is("Unlock of a lease whose process was stopped past its term", p.do("unlock", held),
		hasp.ErrLost))

	b.outlast(e.term) // so that late renewals by the process arrive
	mustf(b.renews(next), "renewal by the successor of a process that was stopped")
	b.give(next)
}
