package walljump

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// seen is the report of testdata/jumper.
type seen struct {
	Can                    bool
	Wall                   int64
	Since, Stripped, Timer time.Duration
	Early, Deadline        string
}

// The first build takes a while; the go command caches its result.
func TestAJumpMovesTheWallClockAndNothingElse(t *testing.T) {
	if testing.Short() {
		t.Skip("builds parts of the standard library")
	}
	out := filepath.Join(t.TempDir(), "jumper.exe")
	if err := Build(t.Context(), "./testdata/jumper", out); err != nil {
		t.Fatal(err)
	}
	requests, reports := start(t, out)
	at := time.Duration(0)
	for _, d := range []time.Duration{time.Minute, -time.Minute, time.Hour, -time.Hour, -999999999, time.Hour + 999999999, 0} {
		// No step of jumper takes that long, however slow the machine is.
		const slow = 50 * time.Second
		before := time.Now().Round(0)
		if err := requests.Encode(d); err != nil {
			t.Fatal(err)
		}
		var s seen
		if err := reports.Decode(&s); err != nil {
			t.Fatal(err)
		}
		after := time.Now().Round(0)
		if wall := time.Unix(0, s.Wall); wall.Before(before.Add(d)) || wall.After(after.Add(d)) {
			t.Errorf("%v: the wall clock is ahead by %v to %v", d, wall.Sub(after), wall.Sub(before))
		}
		if s.Since < 0 || s.Since > slow {
			t.Errorf("%v: the monotonic clock jumped by %v", d, s.Since)
		}
		if got := s.Stripped - (d - at); got < 0 || got > slow {
			t.Errorf("%v after %v: since a wall reading: %v", d, at, s.Stripped)
		}
		if s.Timer < 50*time.Millisecond || s.Timer > slow {
			t.Errorf("%v: a timer of 50ms took %v", d, s.Timer)
		}
		if s.Early != "" || s.Deadline != "context deadline exceeded" {
			t.Errorf("%v: a deadline of 10m ended with %q, one of 50ms with %q", d, s.Early, s.Deadline)
		}
		if !s.Can {
			t.Error("Can returned false")
		}
		at = d
	}
}

// start starts a jumper, which ends with the test.
func start(t *testing.T, path string) (*json.Encoder, *json.Decoder) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	return json.NewEncoder(in), json.NewDecoder(out)
}

func TestAProgramBuiltAsUsualHasTheHostsClock(t *testing.T) {
	before := time.Now().Round(0)
	Set(time.Hour)
	if now := time.Now().Round(0); Can() || now.Sub(before) >= time.Hour {
		t.Errorf("can: %v; from %v to %v", Can(), before, now)
	}
}

func TestAnotherTimeNowIsNotPatched(t *testing.T) {
	const other = "func Now() Time {\n\tsec, nsec, mono := now()\n"
	if _, err := patch([]byte(other)); err == nil || !strings.Contains(err.Error(), "time.Now") {
		t.Errorf("got %v", err)
	}
}
