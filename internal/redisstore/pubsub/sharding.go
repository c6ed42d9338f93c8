package pubsub

import (
	"context"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// sharding finds the servers of channels, and knows whether channels are in slots.
type sharding struct {
	store Config
	known atomic.Pointer[bool] // whether channels are in slots; nil until it is known
}

// server returns the server that has the slot of slotKey. Scripts publish on that server. On a
// cluster, it also asks that server whether channels are in slots, and returns an error if there is
// no answer. It stores the first answer for all later calls, because publishers and subscribers
// must agree.
func (h *sharding) server(ctx context.Context, slotKey string) (redis.UniversalClient, error) {
	server, err := h.store.Server(ctx, slotKey)
	if err != nil || !h.store.Cluster || h.known.Load() != nil {
		return server, err
	}

	// The command lacks its arguments, so it has no effect, and even a server that loads its data
	// answers it by an error. A server without sharded channels does not know the command. If there
	// is no reply, h.known stays nil, and the next call asks again.
	err = server.Do(ctx, "spublish").Err()
	if err != nil && !resp.IsReply(err) {
		return server, err
	}
	sharded := err == nil || !strings.Contains(err.Error(), "unknown command")

	// Store only the first answer, because later answers may differ while a cluster is upgraded.
	h.known.CompareAndSwap(nil, &sharded)
	return server, nil
}

// Sharded reports whether messages must be published by SPUBLISH instead of PUBLISH, as on a
// cluster of Redis 7 or later. The first call asks the server that has the slot of slotKey. If that
// fails, Sharded returns false, and a message may be lost.
func (h *sharding) Sharded(ctx context.Context, slotKey string) bool {
	if h.store.Cluster && h.known.Load() == nil {
		_, _ = h.server(ctx, slotKey) // if this fails, isSharded reports false
	}
	return h.isSharded()
}

// isSharded reports whether it is known that channels are in slots.
func (h *sharding) isSharded() bool {
	sharded := h.known.Load()
	return sharded != nil && *sharded
}
