package redistest

import (
	"context"
	"net"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// VirtualServer is a Redis whose time is that of a testing/synctest bubble: a
// term of 30 s ends when everybody in the bubble has slept that long.
type VirtualServer struct {
	Mini  *miniredis.Miniredis
	Proxy *Proxy
	t     testing.TB
}

// Virtual starts a VirtualServer, which is to be called, and ends, within the
// bubble. No socket is involved.
func Virtual(t testing.TB) *VirtualServer {
	v := &VirtualServer{Mini: miniredis.NewMiniRedis(), t: t}
	v.Mini.ClockTTL(true)
	v.Proxy = newProxy(v.Mini.Dial)
	t.Cleanup(func() {
		v.Proxy.Close()
		v.Mini.Close()
	})
	return v
}

// Client returns a go-redis client of the server, through its Proxy. Its calls
// are bounded by their contexts alone, and sent once.
func (v *VirtualServer) Client() *redis.Client { return v.client(v.Proxy.Dialer()) }

// Direct is Client past the Proxy.
func (v *VirtualServer) Direct() *redis.Client {
	return v.client(func(context.Context, string, string) (net.Conn, error) { return v.Mini.Dial() })
}

func (v *VirtualServer) client(dial func(context.Context, string, string) (net.Conn, error)) *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr:                  "virtual:6379",
		Dialer:                dial,
		ContextTimeoutEnabled: true,
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		DialerRetries:         1,
		MaxRetries:            -1,
		DisableIdentity:       true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	})
	v.t.Cleanup(func() { rdb.Close() })
	return rdb
}
