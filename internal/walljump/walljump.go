// Package walljump builds programs whose wall clock can be set, for tests of code
// that must not depend on the wall clock. Go reads the clock without a call that
// a library could replace, so [Build] builds the program with another time.Now.
// Its wall part is ahead of the host's clock by the argument of [Set]. Its
// monotonic part, and with it timers and deadlines, do not change.
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

// Build builds the program pkg, a package path or a path relative to the working
// directory, and writes it to out. The first build takes longer, because it also
// builds the parts of the standard library that pkg uses.
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
	overlay, err := writeOverlay(filepath.Join(strings.TrimSpace(string(goroot)), "src", "time"), dir)
	if err != nil {
		return fmt.Errorf("walljump: %w", err)
	}

	build := exec.CommandContext(ctx, "go", "build", "-tags", "walljump", "-overlay", overlay, "-o", out, pkg)
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("walljump: go build: %w\n%s", err, output)
	}
	return nil
}

// writeOverlay writes a changed package time into dir, and returns the path of the
// overlay file that replaces the package in src by it.
func writeOverlay(src, dir string) (string, error) {
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

// startOfNow is how time.Now begins in the Go version that patch knows.
const startOfNow = `func Now() Time {
	sec, nsec, mono := runtimeNow()
`

// patch changes time.Now in the text of time.go. It returns an error if the text
// is not as it expects, because the built program would then test nothing.
func patch(text []byte) ([]byte, error) {
	if bytes.Count(text, []byte(startOfNow)) != 1 || !bytes.Contains(text, []byte("\nfunc runtimeIsBubbled() bool\n")) {
		return nil, fmt.Errorf("this version of Go has another time.Now; change the constant startOfNow in package walljump")
	}
	return bytes.Replace(text, []byte(startOfNow), []byte(startOfNow+"\tsec, nsec = wallJumped(sec, nsec)\n"), 1), nil
}

// addition is one more file of package time. Inside a synctest bubble, time.Now
// returns the bubble's time unchanged.
const addition = `package time

import "sync/atomic"

var wallAhead atomic.Int64

// SetWallAhead sets the wall part of Now ahead of the host's clock by d.
func SetWallAhead(d Duration) { wallAhead.Store(int64(d)) }

func wallJumped(sec int64, nsec int32) (int64, int32) {
	d := wallAhead.Load()
	if d == 0 || runtimeIsBubbled() {
		return sec, nsec
	}

	// nsec must be in [0, 1e9).
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
