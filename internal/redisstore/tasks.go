package redisstore

import "sync"

// tasks counts the goroutines of a Store, so that Close can wait for them.
type tasks struct {
	mu     sync.Mutex // makes begin and close exclude each other, and guards closed
	closed bool
	wg     sync.WaitGroup
}

// begin counts a goroutine, which must call end. Once close was called, it returns false instead.
func (t *tasks) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.wg.Add(1)
	return true
}

func (t *tasks) end() { t.wg.Done() }

// spawn runs f on a goroutine of its own. Once close was called, it returns false instead.
func (t *tasks) spawn(f func()) bool {
	if !t.begin() {
		return false
	}
	go func() {
		defer t.end()
		f()
	}()
	return true
}

// close refuses all further goroutines.
func (t *tasks) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
}

func (t *tasks) wait() { t.wg.Wait() }
