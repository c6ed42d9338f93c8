package redisstore

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/hasplock/hasp/internal/redistest"
)

// sentinel is a sentinel that names whichever master the test wants.
type sentinel struct {
	mu          sync.Mutex // guards all below
	master      string
	epoch       int
	subscribers []net.Conn
}

// serve answers the commands of one connection.
func (s *sentinel) serve(c net.Conn) {
	defer c.Close()
	in := bufio.NewScanner(c)
	for in.Scan() {
		fmt.Fprint(c, s.answer(c, strings.ToLower(command(in))))
	}
}

func (s *sentinel) answer(c net.Conn, command string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case strings.HasPrefix(command, "sentinel master"):
		return array("config-epoch", fmt.Sprint(s.epoch))
	case strings.HasPrefix(command, "sentinel get-master"):
		host, port, _ := net.SplitHostPort(s.master)
		return array(host, port)
	case strings.HasPrefix(command, "subscribe"):
		s.subscribers = append(s.subscribers, c)
		return "*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n"
	case command == "ping":
		return "+PONG\r\n"
	}
	return "-ERR unknown command\r\n"
}

// switchTo names another master from now on, and publishes it.
func (s *sentinel) switchTo(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.master = addr
	s.epoch++
	for _, c := range s.subscribers {
		fmt.Fprint(c, array("message", switched, "m"))
	}
}

func array(all ...string) string {
	text := fmt.Sprintf("*%d\r\n", len(all))
	for _, s := range all {
		text += fmt.Sprintf("$%d\r\n%s\r\n", len(s), s)
	}
	return text
}

// The master that the sentinels have switched to may not be usable at once. No other
// message comes. The old master may be cut off from the sentinels, and still answer.
func TestSwitchToAMasterThatIsNotReadyYet(t *testing.T) {
	t.Parallel()
	old := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	next := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	fake := &sentinel{master: old.Addr, epoch: 1}
	s := opened(t, "redis-sentinel://"+redistest.Serve(t, fake.serve)+"/m", nil)
	topology := s.servers.(*sentinels)
	eventually(t, "a subscription", func(context.Context) error {
		fake.mu.Lock()
		defer fake.mu.Unlock()
		if len(fake.subscribers) == 0 {
			return fmt.Errorf("none")
		}
		return nil
	})
	searched := func() (n int64) { // how often next was asked for its role
		for line := range strings.Lines(next.Client().Info(t.Context(), "commandstats").Val()) {
			fmt.Sscanf(line, "cmdstat_role:calls=%d,", &n)
		}
		return n
	}

	next.Follow(old.Addr)
	before := searched()
	fake.switchTo(next.Addr)
	eventually(t, "a search", func(context.Context) error {
		if searched() == before {
			return fmt.Errorf("none")
		}
		return nil
	})
	if err := next.Client().Do(t.Context(), "replicaof", "no", "one").Err(); err != nil {
		t.Fatal(err)
	}

	// The old master still answers, so no call fails.
	eventually(t, "the new master", func(ctx context.Context) error {
		if _, err := s.Do(ctx, "set", "k", "v"); err != nil {
			return err
		}
		if at := topology.known(); at == nil || at.addr != next.Addr {
			return fmt.Errorf("still uses %v", at.addr)
		}
		return nil
	})
}
