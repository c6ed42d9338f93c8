//go:build unix

package cli

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

func TestPasswordFromAFile(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{User: "user", Password: secret})
	config := file(t, "hasp.yaml", "strategy: spinlock\nnodes: ['"+s.URL()+"']\n", 0o600)
	o := runHasp(t, "", "run", "key", "--config", config, "--", "echo", "ran").want(t, 0)
	if o.out != "ran\n" || o.err != "" {
		t.Errorf("stdout %q, stderr %q", o.out, o.err)
	}
}

// ls --watch goes on through an outage, and says once that there is one.
func TestWatchThroughAnOutage(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	url := redisURL(t, s)
	w := startHasp(t, url, "ls", "--watch", "--every", "100ms")
	hold(t, url)
	w.out.expect("/hasp run sh ")
	s.Kill()
	w.err.expect("--watch goes on")
	s.Restart()
	startHasp(t, url, "run", "later", "--", "cat")
	w.out.expect("later")
}

// A server that hangs leads to one line of error within the timeout.
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

func TestLossIsReportedWhenRedisIsGone(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := script(t, redisURL(t, s), "echo ready; exec sleep 600", "--ttl", "9s")
	s.Kill()
	contains(t, p.wait().want(t, exitLost).err, "no renewal was answered before its term ended")
}

// The outcome of the unlock is unknown. The outcome of the command is known.
func TestServerIsGoneAtTheEnd(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := script(t, redisURL(t, s), "echo ready; cat; exit 5", "--ttl", "10m")
	s.Kill()
	contains(t, p.free().want(t, 5).err, "the key is free when its term is over")
}
