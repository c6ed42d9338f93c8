package redisstore

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redistest"
)

// A dial that fails when its caller has gone is no outage for the next one.
func TestAConnectionThatWasNeverMadeIsNobodys(t *testing.T) {
	o := redistest.Start(t, nil).ClientOptions()
	hang, late := make(chan struct{}), atomic.Bool{}
	o.MaxRetries, o.ContextTimeoutEnabled = -1, true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o.Dialer = func(_ context.Context, network, addr string) (net.Conn, error) {
		if late.Swap(true) {
			return net.Dial(network, addr)
		}
		cancel()
		<-hang
		return deadConn{&DialError{errors.New("too late")}}, nil
	}
	rdb := redis.NewClient(o)
	defer rdb.Close()
	if err := rdb.Ping(ctx).Err(); err == nil {
		t.Fatal("a ping over a dial that hangs")
	}
	close(hang)
	for deadline := time.Now().Add(20 * time.Second); rdb.PoolStats().IdleConns == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("go-redis does not keep the connection any more: deadConn need not be a syscall.Conn")
		}
	}
	if err := rdb.Ping(t.Context()).Err(); err != nil {
		t.Errorf("the next caller hears %v", err)
	}
}
