//go:build unix

package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

func TestRunOnRedis(t *testing.T) {
	t.Parallel()
	url := redisURL(t, redistest.Start(t, nil))
	holder := hold(t, url, "key", "--fence")
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, exitNotAcquired)
	contains(t, runHasp(t, url, "inspect", "key").want(t, 0).out, "/hasp run sh")
	holder.in.Close()
	holder.wait().want(t, 0)
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, 0)
}

func TestPasswordFromAFile(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{User: "user", Password: secret})
	file := filepath.Join(t.TempDir(), "hasp.yaml")
	if err := os.WriteFile(file, []byte("strategy: spinlock\nnodes: ['"+s.URL()+"']\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o := runHasp(t, "", "run", "key", "--config", file, "--", "echo", "ran").want(t, 0)
	if o.out != "ran\n" || o.err != "" {
		t.Errorf("stdout %q, stderr %q", o.out, o.err)
	}
}

// What a server may do to its clients: one line within the timeout, which is
// long for a server that answers.
func TestBadServer(t *testing.T) {
	t.Parallel()
	const timeout, brief = "timeout=50s", "timeout=5s"
	t.Run("wrong password", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t, &redistest.Options{Password: "another"})
		refusedBy(t, "spinlock+redis://:"+secret+"@"+s.Addr+"?"+timeout, "password")
	})
	t.Run("no password", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t, &redistest.Options{Password: secret})
		refusedBy(t, "spinlock+redis://"+s.Addr+"?"+timeout, "password")
	})
	t.Run("TLS to a plain port", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t, &redistest.Options{Own: true})
		refusedBy(t, "spinlock+rediss://:"+secret+"@"+s.Addr+"?"+brief, "TLS") // which takes it for half a command
	})
	t.Run("plain to a TLS port", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t, &redistest.Options{TLS: true})
		refusedBy(t, "spinlock+redis://:"+secret+"@"+s.Addr+"?"+timeout, "TLS")
	})
	t.Run("hangs", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t, &redistest.Options{Own: true})
		s.Pause()
		defer s.Resume()
		refusedBy(t, "spinlock+redis://:"+secret+"@"+s.Addr+"?"+brief, "no answer")
	})
}

func refusedBy(t *testing.T, url, says string) {
	t.Helper()
	began := time.Now()
	for _, args := range [][]string{{"inspect", "key"}, {"run", "key", "--", "true"}, {"break", "key", "--force"}} {
		runHasp(t, url, args...).refused(t, exitStore, says)
	}
	if took := time.Since(began); took > patience {
		t.Errorf("took %v", took)
	}
}

func TestLossIsToldWhenRedisLosesItsData(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	url := redisURL(t, s)
	p := startHasp(t, url, "run", "key", "--ttl", soonLost, "--", "sh", "-c", "echo ready; exec sleep 600")
	p.out.expect("ready")
	s.Kill()
	s.Restart()
	contains(t, p.wait().want(t, exitLost).err, `hasp: lost "key"`)
	runHasp(t, url, "run", "key", "--", "true").want(t, 0)
}

func TestLossIsToldWhenRedisIsGone(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := startHasp(t, redisURL(t, s), "run", "key", "--ttl", "9s", "--", "sh", "-c", "echo ready; exec sleep 600")
	p.out.expect("ready")
	s.Kill()
	contains(t, p.wait().want(t, exitLost).err, "no renewal was answered before its term ended")
}

// The outcome of the unlock is unknown; that of the command is not.
func TestServerIsGoneAtTheEnd(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := startHasp(t, redisURL(t, s), "run", "key", "--ttl", "10m", "--", "sh", "-c", "echo ready; cat; exit 5")
	p.out.expect("ready")
	s.Kill()
	p.in.Close()
	contains(t, p.wait().want(t, 5).err, "the key is free when its term is over")
}
