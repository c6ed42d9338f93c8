package pubsub

const (
	DeadAfter    = deadAfter
	IdleAfter    = idleAfter
	Lingering    = lingering
	PingEvery    = pingEvery
	WriteTimeout = writeTimeout
)

// Wait returns when no goroutine of b runs any more.
func (b *Subscriber) Wait() { b.wg.Wait() }
