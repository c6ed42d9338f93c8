//go:build unix

package cli

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/memlock"
)

// A successor must not lead before the leader has ended.
func TestLeadersFollowEachOther(t *testing.T) {
	t.Parallel()
	url, end := store(t), filepath.Join(t.TempDir(), "end")
	script := []string{"lead", "key", "--ttl", soonLost, "--", "sh", "-c",
		`trap 'until [ -e "$0" ]; do sleep 0.02; done; echo drained; exit 3' TERM; echo leads; while :; do sleep 0.02; done`, end}
	first := startHasp(t, url, script...)
	first.out.expect("leads")
	second := startHasp(t, url, script...)
	second.err.expect(`waiting for the lead of "key", held by`)

	// The first leader drains for longer than a term. It keeps the key meanwhile.
	first.signal(syscall.SIGTERM)
	time.Sleep(700 * time.Millisecond)
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, exitNotAcquired)
	await.Must(t, os.WriteFile(end, nil, 0o600))
	contains(t, first.wait().want(t, 3).out, "drained")
	second.out.expect("leads")
	second.signal(syscall.SIGTERM)
	second.wait().want(t, 3)
}

func TestLeadResumesAfterALoss(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "lead", "key", "--ttl", soonLost, "--", "sh", "-c", `trap 'echo stopped; exit 0' TERM; echo leads; while :; do sleep 0.02; done`)
	p.out.expect("leads")
	for i := range 2 {
		breakKey(t, url)
		p.out.times(i+1, "stopped")
		p.out.times(i+2, "leads")
	}
	contains(t, p.err.String(), `lost the lead of "key": the store does not have it any more`)

	p.signal(syscall.SIGTERM)
	p.wait().want(t, 0)

	// A signal ends a hasp lead that waits for the key.
	holder := hold(t, url)
	p = startHasp(t, url, "lead", "key", "--", "true")
	p.err.expect("waiting for")
	p.signal(syscall.SIGTERM)
	p.wait().want(t, exitSignal+int(syscall.SIGTERM))
	holder.free()
}

func TestLeadRidesOutAnOutage(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Own)
	url := redisURL(t, srv) + "?timeout=300ms"
	holder := hold(t, url, "--ttl", "1s")
	p := startHasp(t, url, "lead", "key", "--", "echo", "leads")
	p.err.expect("waiting for")
	srv.Kill()
	holder.wait().want(t, exitLost)
	p.err.expect("hasp goes on asking")
	srv.Restart()
	p.out.expect("leads")
	p.wait().want(t, 0)
}

// A signal arrives when hasp has just got the key. The command would not receive it, so the command
// must not begin.
func TestSignalBeforeTheCommandBegins(t *testing.T) {
	t.Parallel()
	client := await.Value(memlock.New(nil))
	defer client.Close()
	lease := await.Value(client.Lock(t.Context(), "key"))
	defer lease.Unlock(t.Context())

	cancelled := false
	l := &lead{run: run{app: &app{}, key: "key", argv: []string{"true"}, path: "/bin/true"}, cancel: func() { cancelled = true }}
	l.signals = make(chan os.Signal, 1)
	l.signals <- syscall.SIGTERM
	if err := l.leadOnce(t.Context(), lease); err == nil || l.ended || !cancelled {
		t.Errorf("error %v, the command ran: %v, Lead is cancelled: %v", err, l.ended, cancelled)
	}
}
