package redistest

import (
	"crypto/rand"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2/server"
)

// identity adds to miniredis a run ID, and a clock that can be set.
type identity struct {
	mu    sync.Mutex // guards all below
	run   string
	began time.Time
	skew  time.Duration
}

// renew starts a new run of the server.
func (i *identity) renew() {
	b := make([]byte, 20)
	rand.Read(b)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.run, i.began = fmt.Sprintf("%x", b), time.Now()
}

// answer is a hook of miniredis, which calls it for every command, including those
// of scripts. It reports whether it has answered.
func (i *identity) answer(c *server.Peer, cmd string, args ...string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case cmd == "INFO" && (len(args) == 0 || slices.ContainsFunc(args, func(a string) bool { return strings.EqualFold(a, "server") })):
		c.WriteBulk(fmt.Sprintf("# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\nrun_id:%s\r\nuptime_in_seconds:%d\r\n",
			i.run, int(time.Since(i.began).Seconds())))
		return true
	case cmd == "TIME" && i.skew != 0:
		now := time.Now().Add(i.skew)
		c.WriteLen(2)
		c.WriteBulk(strconv.FormatInt(now.Unix(), 10))
		c.WriteBulk(strconv.Itoa(now.Nanosecond() / 1000))
		return true
	}
	return false
}
