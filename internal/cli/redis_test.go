//go:build unix

package cli

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

func TestRunOnRedis(t *testing.T) {
	t.Parallel()
	url := redisURL(t, redistest.Start(t, nil))
	holder := hold(t, url, "--fence")
	lock(t, url, exitNotAcquired, "--no-wait")
	contains(t, runHasp(t, url, "inspect", "key").want(t, 0).out, "/hasp run sh")
	holder.free().want(t, 0)
	lock(t, url, 0, "--no-wait")
}

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

// A bad server leads to one line of error within the timeout. A timeout of 50
// seconds is much longer than a server that answers needs.
func TestBadServer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		server              *redistest.Options
		transport, password string // of the URL
		timeout             string
		says                string
		pause               bool
	}{
		"wrong password": {&redistest.Options{Password: "another"}, "redis", secret, "50s", "password", false},
		"no password":    {&redistest.Options{Password: secret}, "redis", "", "50s", "password", false},
		// The server takes the TLS handshake for half a command, and waits.
		"TLS to a plain port": {&redistest.Options{Own: true}, "rediss", secret, "5s", "TLS", false},
		"plain to a TLS port": {&redistest.Options{TLS: true}, "redis", secret, "50s", "TLS", false},
		"hangs":               {&redistest.Options{Own: true}, "redis", secret, "5s", "no answer", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t, c.server)
			if c.pause {
				s.Pause()
				defer s.Resume()
			}
			url := "spinlock+" + c.transport + "://"
			if c.password != "" {
				url += ":" + c.password + "@"
			}
			url += s.Addr + "?timeout=" + c.timeout
			began := time.Now()
			for _, args := range [][]string{{"inspect", "key"}, {"ls"}, {"run", "key", "--", "true"}, {"break", "key", "--force"}} {
				runHasp(t, url, args...).refused(t, exitStore, c.says)
			}
			if took := time.Since(began); took > patience {
				t.Errorf("took %v", took)
			}
		})
	}
}

func TestLossIsReportedWhenRedisLosesItsData(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	url := redisURL(t, s)
	p := script(t, url, "echo ready; exec sleep 600", "--ttl", soonLost)
	s.Kill()
	s.Restart()
	contains(t, p.wait().want(t, exitLost).err, `hasp: lost "key"`)
	lock(t, url, 0)
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
