package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// processClauses start this program again. For a driver that reaches one process
// only the first has a point.
var processClauses = []clause{
	{
		name:  "reach",
		why:   "Drivers that reach the host or the network exclude callers in other processes. Drivers that reach the process do not.",
		says:  saysReach,
		check: reach,
	},
	{
		name:  "process-exclusion",
		why:   "Clients in several processes hold one key one at a time.",
		says:  saysOneHolder,
		need:  processes,
		check: processExclusion,
	},
	{
		name:  "process-woken",
		why:   "A waiter gets a key that another process releases.",
		says:  saysWaitGets,
		need:  all(processes, waiter),
		check: processWoken,
	},
	{
		name:  "process-killed-holder",
		why:   "If a process that holds a key is killed, the key is free after its term.",
		says:  saysFree,
		need:  processes,
		check: processKilledHolder,
	},
	{
		name:  "process-killed-waiter",
		why:   "A waiter whose process was killed does not keep the others from the key.",
		says:  saysDeadWaiter,
		need:  all(processes, waiter),
		check: processKilledWaiter,
	},
	{
		name:  "process-stopped-holder",
		why:   "A process that was stopped past its term sees the loss at its first check. Its renewals and its Unlock do not affect the successor.",
		says:  saysHasp,
		need:  processes,
		check: processStoppedHolder,
	},
	{
		name:  "process-order",
		why:   "Ordered drivers serve the waiters of all processes in order of arrival.",
		says:  saysOrdered,
		need:  all(processes, ordered),
		check: processOrder,
	},
}

func reach(e *env) error {
	a := e.open()
	c := a.hold(e.h.Long)
	err := e.spawn().do("acquire", e.claimOf(c.Key, e.h.Long))
	if e.traits.Reach == backend.Process {
		if errors.Is(err, backend.ErrHeld) {
			return errors.New("a key that is held is refused to another process by a driver whose Reach is Process")
		}
		return nil
	}
	return is("acquire in another process a key that is held", err, backend.ErrHeld)
}

// count increments the number in a file under the lock. A second file exists while
// a caller is inside.
func count(ctx context.Context, c *hasp.Client, key, dir string, times int) error {
	inside, number := filepath.Join(dir, "inside"), filepath.Join(dir, "number")
	for began := time.Now(); times > 0 && time.Since(began) < patience; times-- {
		lease, err := c.Lock(ctx, key, hasp.WithTTL(patience))
		if err != nil {
			return err
		}
		f, err := os.OpenFile(inside, os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) {
			return errors.New("two processes hold one key")
		}
		if err != nil {
			return err
		}
		b, err := os.ReadFile(number)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		n, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		if err := os.WriteFile(number, []byte(strconv.Itoa(n+1)), 0o600); err != nil {
			return err
		}
		if err := errors.Join(f.Close(), os.Remove(inside), lease.Unlock(ctx)); err != nil {
			return err
		}
	}
	if times > 0 {
		return fmt.Errorf("%d turns of many not had in %v", times, patience)
	}
	return nil
}

func processExclusion(e *env) error {
	dir, err := os.MkdirTemp("", "hasp-conformance-")
	must(err)
	e.onEnd(func() { os.RemoveAll(dir) })
	key := e.key()
	const n, times = 3, 15
	children := make([]*child, n)
	must(e.each(n, func(i int) error { children[i] = e.spawn(); return nil }))
	own := e.newClient()
	err = e.each(n+1, func(i int) error {
		if i == n {
			return count(e.ctx, own, key, dir, times)
		}
		c := e.claimOf(key, e.h.Long)
		// The limit of arrives is patience as well.
		done := children[i].begin(request{Op: "count", Claim: c, Dir: dir, Times: times})
		select {
		case err := <-done:
			return err
		case <-e.ctx.Done():
			return e.ctx.Err()
		}
	})
	must(err)
	b, err := os.ReadFile(filepath.Join(dir, "number"))
	must(err)
	if want := strconv.Itoa((n + 1) * times); string(b) != want {
		return fmt.Errorf("%s increments under the lock came to %s", want, b)
	}
	return nil
}

func processWoken(e *env) error {
	a, p := e.open(), e.spawn()
	key := e.key()
	for range 5 {
		// The key goes there and back.
		mine, theirs := e.claimOf(key, e.h.Long), e.claimOf(key, e.h.Long)
		a.take(mine)
		waits := p.begin(request{Op: "wait", Claim: theirs})
		e.sleep(e.term / 8)
		a.give(mine)
		must(e.arrives("Wait in another process for a key that was released", waits))
		must(p.do("renew", theirs))
		must(a.refused(key))
		w := a.want(e.claimOf(key, e.h.Long))
		e.sleep(e.term / 8)
		must(p.do("release", theirs))
		must(e.arrives("Wait for a key that another process released", w.done))
		a.keep(w.c)
		a.give(w.c)
	}
	return nil
}

func processKilledHolder(e *env) error {
	c, p := e.newClient(), e.spawn()
	b := e.open()
	held := e.claim(e.term)
	must(p.do("lock", held))
	b.outlast(e.term)
	if err := b.refused(held.Key); err != nil {
		if p.do("err", held) != nil {
			return slow("no renewal in another process for a term of %v", e.term)
		}
		return fmt.Errorf("while another process renews: %w", err)
	}
	done := make(chan error, 1)
	go func() {
		lease, err := c.Lock(e.ctx, held.Key)
		if err == nil {
			err = lease.Unlock(e.ctx)
		}
		done <- err
	}()
	p.kill()
	return e.arrives("Lock of a key whose holder was killed", done)
}

func processKilledWaiter(e *env) error {
	a, b, p := e.open(), e.open(), e.spawn()
	c := a.hold(e.h.Long)
	p.begin(request{Op: "wait", Claim: e.claimOf(c.Key, e.term)})
	e.queued(a, c.Key, 1)
	w := b.want(e.claimOf(c.Key, e.h.Long))
	e.queued(a, c.Key, 2)
	p.kill()
	a.give(c)
	must(e.arrives("Wait behind a waiter that was killed", w.done))
	b.keep(w.c)
	return b.release(w.c)
}

func processStoppedHolder(e *env) error {
	b, p := e.open(), e.spawn()
	held := e.claim(e.term)
	must(p.do("lock", held))
	if err := p.do("err", held); err != nil {
		return slow("a lease right after Lock: %w", err)
	}
	hooked(pause(p.cmd.Process))
	next, _, err := b.seize(held.Key, e.h.Long)
	if err != nil {
		// The process may have been stopped during a renewal. The next try
		// has a longer term, so that is less likely.
		return slow("a key whose holder was stopped: %w", err)
	}
	hooked(resume(p.cmd.Process))
	must(is("Err of a lease whose process was stopped past its term", p.do("err", held), hasp.ErrLost))
	must(is("Unlock of a lease whose process was stopped past its term", p.do("unlock", held), hasp.ErrLost))
	b.outlast(e.term)
	mustf(b.renews(next), "renewal by the successor of a process that was stopped")
	return b.release(next)
}

func processOrder(e *env) error {
	const n = 4
	a := e.open()
	children := make([]*child, n/2)
	must(e.each(len(children), func(i int) error { children[i] = e.spawn(); return nil }))
	c := a.hold(e.h.Long)
	cs, waits := make([]backend.Claim, n), make([]<-chan error, n)
	for i := range n {
		cs[i] = e.claimOf(c.Key, e.h.Long)
		waits[i] = children[i%len(children)].begin(request{Op: "wait", Claim: cs[i]})
		e.queued(a, c.Key, i+1)
	}
	a.give(c)
	var mu sync.Mutex // guards got
	var got []int
	err := e.each(n, func(i int) error {
		if err := e.arrives("a waiter in another process", waits[i]); err != nil {
			return err
		}
		mu.Lock()
		got = append(got, i)
		mu.Unlock()
		return children[i%len(children)].do("release", cs[i])
	})
	must(err)
	if !slices.IsSorted(got) {
		err := fmt.Errorf("waiters of several processes got the key in order %v", got)
		if !e.inspector {
			return slow("%w", err)
		}
		return err
	}
	return nil
}
