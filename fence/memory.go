package fence

import (
	"context"
	"sync"
)

// Memory guards resources that live in this process, such as a cache or a connection to a device.
// It forgets all fences when the process ends, so it does not suit a resource that outlives the
// process. The zero value is ready. Memory keeps an entry for each resource.
type Memory struct {
	mu      sync.Mutex // guards entries
	entries map[string]*entry
}

// entry is what Memory knows of a resource.
type entry struct {
	// turn has room for one value. The caller that puts a value in may write to the resource, and
	// use the field seen.
	turn chan struct{}
	seen uint64 // the largest fence so far
}

// Do calls write, unless a larger fence than the one of ctx was seen for the resource. In that case
// it returns a [*StaleError]. No two writes to a resource run at the same time. If ctx ends before
// the writes of others have ended, Do returns ctx's cause. A write that fails or panics also raises
// the fence, because it may have changed something.
func (m *Memory) Do(ctx context.Context, resource string, write func(context.Context) error) error {
	f, err := Of(ctx)
	if err != nil {
		return err
	}

	e := m.entry(resource)
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	case <-ctx.Done():
	}
	if ctx.Err() != nil { // select may have chosen the turn although ctx had ended
		return context.Cause(ctx)
	}

	if err := Compare(resource, f, e.seen); err != nil {
		return err
	}
	e.seen = f // before the write, because a write that fails also raises the fence
	return write(ctx)
}

// entry returns the entry of a resource.
func (m *Memory) entry(resource string) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.entries == nil {
		m.entries = map[string]*entry{}
	}

	e := m.entries[resource]
	if e == nil {
		e = &entry{turn: make(chan struct{}, 1)}
		m.entries[resource] = e
	}
	return e
}
