package redisstore

import (
	"context"
	"net"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// CountDials has Dials count the connections of a client that was handed in,
// by a hook that stays with the client.
func (s *Store) CountDials() {
	if s.dials == nil {
		s.dials = new(atomic.Uint64)
		s.rdb.AddHook(dialHook{s.dials})
	}
}

// Dials grows whenever a connection is begun to be made, and again when it is
// made. As long as it has not, whatever was answered came from a server that
// has run all the time.
func (s *Store) Dials() uint64 { return s.dials.Load() }

// dialHook counts connections.
type dialHook struct{ dials *atomic.Uint64 }

func (h dialHook) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		h.dials.Add(1)
		defer h.dials.Add(1)
		return next(ctx, network, addr)
	}
}

func (dialHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (dialHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
