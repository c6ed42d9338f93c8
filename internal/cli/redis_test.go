//go:build unix

package cli

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// If the server hangs, a command prints one line of error within the timeout.
func TestServerHangs(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	s.Pause()
	defer s.Resume()
	began := time.Now()
	for _, args := range [][]string{{"inspect", "key"}, {"ls"}, {"run", "key", "--", "true"}, {"break", "key", "--force"}} {
		runHasp(t, "spinlock+redis://"+s.Addr+"?timeout=2s", args...).refused(t, exitStore, "no answer")
	}
	if took := time.Since(began); took > patience {
		t.Errorf("took %v", took)
	}
}

// The exit code is the command's, although the outcome of the unlock is unknown.
func TestServerIsGoneAtTheEnd(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := script(t, redisURL(t, s), "echo ready; cat; exit 5", "--ttl", "10m")
	s.Kill()
	contains(t, p.free().want(t, 5).err, "the key is free when its term is over")
}
