package pubsub

const (
	DeadAfter    = deadAfter
	Lingering    = lingering
	TickEvery    = tickEvery
	WriteTimeout = writeTimeout
)

// Wait returns when no goroutine of b runs any more.
func (b *Subscriber) Wait() { b.wg.Wait() }
