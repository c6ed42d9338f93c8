package pubsublock

import (
	"sync"
	"time"
)

// A writer that waits for readers stores an intent, which keeps out new readers. The driver passes
// the intent's key to a script only if readers have refused the driver at that key before.
// Therefore an intent costs nothing for keys without readers.
const (
	intentTTL = 3 * time.Second // the writer repeats the intent once a second
	// how long after a refusal the driver passes the intent's key
	intendsFor = intentTTL + time.Second
)

// These limit how long the method published delays a wake-up for the turns of other Clients.
const (
	minDelay = 200 * time.Microsecond // a shorter delay is not worth a timer
	oneDelay = 10 * time.Millisecond  // the most for one turn of another Client
	maxDelay = 100 * time.Millisecond // the most for all turns together

	// how long after a release the noted count can delay this driver's next caller
	crowdFor = 250 * time.Millisecond
	// if only one Client waits, a message reaches at most its connection and this driver's own
	maxAlone = 2
)

// listening is one call of Listen.
type listening struct {
	wake chan struct{} // see backend.Waker

	mu    sync.Mutex  // guards the fields below
	timer *time.Timer // signals wake after a delay; nil if no message was held back
	woken time.Time   // when the last message came, or when Listen began
	ahead int         // how many other Clients take the key first: see driver.crowds
}

// The method published runs for each message, and when messages may have been missed. It ignores
// its arguments, because the key may be free in both cases. It signals wake, now or after a delay.
func (l *listening) published(string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.delay(time.Now())
	switch {
	case d < minDelay:
		l.signal()
	case l.timer == nil:
		l.timer = time.AfterFunc(d, l.signal)
	default:
		// This message came after another Client's turn, so count the delay from now on.
		l.timer.Reset(d)
	}
}

func (l *listening) signal() {
	select {
	case l.wake <- struct{}{}:
	default: // the channel already contains a signal, whose attempt also begins after this release
	}
}

// delay returns how long to leave the key to other Clients after a message. Redis sends messages to
// subscribers in a fixed order, so if all Clients tried at once, the same one would always take the
// key. Therefore a Client waits for n·min(since/8, oneDelay), where n is the number of turns before
// its own, and since is the time from the last message to this one. The delay is at most since/2
// and at most maxDelay, because the key stays free meanwhile if the other Clients have left.
func (l *listening) delay(now time.Time) time.Duration {
	since := now.Sub(l.woken) // how long the turn of another Client took
	l.woken = now
	l.ahead = max(l.ahead-1, 0) // each message means that one more turn is over
	return min(time.Duration(l.ahead)*min(since/8, oneDelay), since/2, maxDelay)
}

// memory holds recent facts about keys.
type memory[T any] struct {
	mu    sync.Mutex // guards noted
	noted map[string]note[T]
}

type note[T any] struct {
	what T
	at   time.Time
}

// maxNoted limits the keys in a memory. After a key is forgotten, its intent stays until the intent
// expires, and one Client may take the key more often than the others.
const maxNoted = 256

func (m *memory[T]) note(key string, what T) {
	m.mu.Lock()
	defer m.mu.Unlock()

	// If there are too many keys, forget all, because those in use are soon noted again.
	if m.noted == nil || len(m.noted) >= maxNoted {
		m.noted = map[string]note[T]{}
	}
	m.noted[key] = note[T]{what, time.Now()}
}

// get returns the note about key. The result ok is false if there is no note, or if the note is
// older than maxAge.
func (m *memory[T]) get(key string, maxAge time.Duration) (what T, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, ok := m.noted[key]
	return n.what, ok && time.Since(n.at) < maxAge
}

func (m *memory[T]) forget(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.noted, key)
}
