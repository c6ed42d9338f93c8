package pubsub

import "github.com/hasplock/hasp/internal/redisstore/resp"

const (
	DeadAfter    = deadAfter
	Lingering    = lingering
	TickEvery    = tickEvery
	WriteTimeout = resp.WriteTimeout
)

// Wait returns when no goroutine of b runs any more.
func (b *Subscriber) Wait() { b.wg.Wait() }
