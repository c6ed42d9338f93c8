package redisstore

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redistest"
)

// replier starts a server that answers the commands with which a connection begins, and
// all others by reply. It returns the address.
func replier(t *testing.T, reply func(command string) string) (addr string) {
	t.Helper()
	return redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		buf := make([]byte, 4096)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			text := reply(strings.ToLower(string(buf[:n])))
			switch said := bytes.ToLower(buf[:n]); { // of a client that was passed
			case bytes.Contains(said, []byte("hello")):
				text = "%1\r\n+proto\r\n:3\r\n"
			case bytes.Contains(said, []byte("\nclient\r")):
				text = strings.Repeat("+OK\r\n", bytes.Count(said, []byte("\nclient\r")))
			}
			if _, err := io.WriteString(c, text); err != nil {
				return
			}
		}
	})
}

// A reply on the connection of the subscriptions may not be a message.
func TestListeningSurvivesInvalidMessages(t *testing.T) {
	for _, said := range []string{"*0\r\n", ">0\r\n", "*1\r\n:1\r\n", "*1\r\n+subscribe\r\n", "*3\r\n+message\r\n:1\r\n:2\r\n",
		"*3\r\n+message\r\n+c\r\n*1\r\n:1\r\n", "*1\r\n+pong\r\n", "*2\r\n+pong\r\n:1\r\n", "*2\r\n+pmessage\r\n+c\r\n", ":1\r\n", "_\r\n", "*1\r\n*1\r\n*0\r\n"} {
		t.Run(fmt.Sprintf("%q", said), func(t *testing.T) {
			t.Parallel()
			var later atomic.Bool
			addr := replier(t, func(string) string {
				if !later.Swap(true) { // to the PING of a new connection
					return "+PONG\r\n"
				}
				return said
			})
			s, _ := prepared(t, "redis://"+addr, nil, 0)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if l, err := s.Listen(ctx, "c", "c", func(string, bool) {}); err == nil {
				l.Close()
				t.Error("Listen succeeds")
			}
		})
	}
}

// A reply can make a client panic that the caller passed. The program goes on.
func TestAClientThatPanicsIsAnOutage(t *testing.T) {
	addr := replier(t, func(string) string { return "$9223372036854775806\r\n" })
	rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	defer rdb.Close()
	s := New(rdb)
	defer s.Close()
	if _, err := s.Do(t.Context(), "get", "k"); err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("a command: %v", err)
	}
	s.RunEach(t.Context(), reading, []Call{{Keys: []string{"a"}}, {Keys: []string{"b"}}}, func(_ int, v any, err error) {
		if err == nil {
			t.Errorf("a pipeline: got %v", v)
		}
	})
	if l, err := s.Listen(t.Context(), "c", "c", func(string, bool) {}); err == nil {
		l.Close()
		t.Error("a channel: Listen succeeds")
	}
}

// A reply too many to the login must not become the reply to the first command.
func TestALoginWithAReplyTooManyFails(t *testing.T) {
	t.Skip("go-redis does not notice it")
	addr := replier(t, func(said string) string {
		if strings.Contains(said, "auth") {
			return "+OK\r\n+OK\r\n"
		}
		return "$-1\r\n"
	})
	s, _ := prepared(t, "redis://:pw@"+addr, nil, 0)
	if v, err := s.Do(t.Context(), "set", "k", "v", "nx"); err == nil {
		t.Errorf("got %v", v)
	}
}
