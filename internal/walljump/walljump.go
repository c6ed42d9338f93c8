// Package walljump has programs whose wall clock can be set, for tests of what
// must not depend on it. Go reads the clock without a call that something
// could step into, so [Build] builds such a program with another time.Now:
// the monotonic part of what it returns, and with it timers and deadlines, is
// as ever, and the wall part is ahead of the host's by what [Set] said.
package walljump

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Build builds the program pkg, as it is called in the working directory, at
// the path out. The first time takes as long as to build what it uses of the
// standard library; later the go command has that in its cache.
func Build(ctx context.Context, pkg, out string) error {
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("walljump: go env: %w", err)
	}
	dir, err := os.MkdirTemp("", "walljump")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	overlay, err := overlay(filepath.Join(strings.TrimSpace(string(goroot)), "src", "time"), dir)
	if err != nil {
		return fmt.Errorf("walljump: %w", err)
	}
	build := exec.CommandContext(ctx, "go", "build", "-tags", "walljump", "-overlay", overlay, "-o", out, pkg)
	if said, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("walljump: go build: %w\n%s", err, said)
	}
	return nil
}

// overlay writes into dir what the go command is to take for the package time
// in src, and returns the file that tells it so.
func overlay(src, dir string) (string, error) {
	original := filepath.Join(src, "time.go")
	text, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	if text, err = patch(text); err != nil {
		return "", fmt.Errorf("%s: %w", original, err)
	}
	patched, added := filepath.Join(dir, "time.go"), filepath.Join(dir, "walljump.go")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {
		original:                          patched,
		filepath.Join(src, "walljump.go"): added,
	}})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	for path, content := range map[string][]byte{patched: text, added: []byte(addition), overlay: list} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return "", err
		}
	}
	return overlay, nil
}

// reading is how Now begins.
const reading = `func Now() Time {
	sec, nsec, mono := runtimeNow()
`

// patch changes Now in the text of package time.
func patch(text []byte) ([]byte, error) {
	if bytes.Count(text, []byte(reading)) != 1 || !bytes.Contains(text, []byte("\nfunc runtimeIsBubbled() bool\n")) {
		return nil, fmt.Errorf("not the time.Now that is known here; this Go is another, and the constant reading in package walljump has to follow it")
	}
	return bytes.Replace(text, []byte(reading), []byte(reading+"\tsec, nsec = wallJumped(sec, nsec)\n"), 1), nil
}

// addition is a file more of package time. Within a bubble of testing/synctest
// the clock is that of the bubble.
const addition = `package time

import "sync/atomic"

var wallAhead atomic.Int64

// SetWallAhead sets the wall part of what Now returns ahead by d.
func SetWallAhead(d Duration) { wallAhead.Store(int64(d)) }

func wallJumped(sec int64, nsec int32) (int64, int32) {
	d := wallAhead.Load()
	if d == 0 || runtimeIsBubbled() {
		return sec, nsec
	}
	ns := int64(nsec) + d%1e9
	sec += d / 1e9
	switch {
	case ns < 0:
		sec, ns = sec-1, ns+1e9
	case ns >= 1e9:
		sec, ns = sec+1, ns-1e9
	}
	return sec, int32(ns)
}
`
