package redisstore

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redistest"
)

// replier starts a server that answers the commands with which a connection begins, and
// all others by reply. It returns the address.
func replier(t *testing.T, reply func() string) (addr string) {
	t.Helper()
	return redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		buf := make([]byte, 4096)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			said := strings.ToLower(string(buf[:n]))
			text := ""
			switch clients := strings.Count(said, "\nclient\r"); {
			case strings.Contains(said, "hello"):
				text = "%1\r\n+proto\r\n:3\r\n"
			case clients > 0: // of a client that was passed
				text = strings.Repeat("+OK\r\n", clients)
			default:
				text = reply()
			}
			if _, err := io.WriteString(c, text); err != nil {
				return
			}
		}
	})
}

// refusesToListen fails the test unless Listen returns an error other than that of its context.
func refusesToListen(t *testing.T, s *Store) {
	t.Helper()
	l, err := s.Listen(t.Context(), "c", "c", func(string, bool) {})
	if err == nil {
		l.Close()
		t.Error("Listen succeeds")
	}
}

// A reply on the connection of the subscriptions may not be a message.
func TestListeningSurvivesInvalidMessages(t *testing.T) {
	for _, said := range []string{
		"*0\r\n", ">0\r\n", "*1\r\n:1\r\n", "*1\r\n+subscribe\r\n",
		"*3\r\n+message\r\n:1\r\n:2\r\n",
		"*3\r\n+message\r\n+c\r\n*1\r\n:1\r\n", "*1\r\n+pong\r\n", "*2\r\n+pong\r\n:1\r\n",
		"*2\r\n+pmessage\r\n+c\r\n", ":1\r\n", "_\r\n", "*1\r\n*1\r\n*0\r\n",
	} {
		t.Run(fmt.Sprintf("%q", said), func(t *testing.T) {
			t.Parallel()
			var later atomic.Bool
			addr := replier(t, func() string {
				if !later.Swap(true) { // to the PING of a new connection
					return "+PONG\r\n"
				}
				return said
			})
			s, _ := prepared(t, "redis://"+addr)
			returns(t, "Listen", func() { refusesToListen(t, s) })
		})
	}
}

// A reply can make a client panic that the caller passed. The program goes on.
func TestAClientThatPanicsIsAnOutage(t *testing.T) {
	addr := replier(t, func() string { return "$9223372036854775806\r\n" })
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	defer rdb.Close()
	s := New(rdb)
	defer s.Close()
	wantsOutage(t, reply(s.Do(t.Context(), "get", "k")).Err, "panicked")
	for _, r := range each(t.Context(), s, counting, "a", "b") {
		wantsOutage(t, r.Err, "panicked")
	}
	refusesToListen(t, s)
}
