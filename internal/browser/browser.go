// Package browser tests the page of "hasp ui" in a real Chromium. "go run ./picture" makes
// the pictures of the page in docs.
package browser

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/chromedp/chromedp"
)

// names are the programs that may be a Chromium.
var names = []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"}

// ErrNone says that no Chromium is installed.
var ErrNone = errors.New("no Chromium is installed: apt-get install chromium")

// Find returns the path of a Chromium, or ErrNone.
func Find() (string, error) {
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrNone
}

// Start starts a Chromium without a screen, which keeps its files in dir. The context is for
// chromedp, and ends with ctx or when stop is called.
func Start(ctx context.Context, dir string) (_ context.Context, stop func(), err error) {
	path, err := Find()
	if err != nil {
		return nil, nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path),
		chromedp.UserDataDir(filepath.Join(dir, "profile")), chromedp.Env("TMPDIR="+dir), chromedp.WindowSize(1200, 900))
	if os.Getuid() == 0 {
		// Chromium has no sandbox for root. The pages are ours.
		options = append(options, chromedp.NoSandbox)
	}
	ctx, stopAll := chromedp.NewExecAllocator(ctx, options...)
	ctx, stopFirst := chromedp.NewContext(ctx)
	stop = func() { stopFirst(); stopAll() }
	if err := chromedp.Do(ctx); err != nil {
		stop()
		return nil, nil, fmt.Errorf("start %s: %w", path, err)
	}
	return ctx, stop, nil
}

// Build builds hasp from this repository into dir, and returns its path. root leads to the
// root of the repository.
func Build(ctx context.Context, root, dir string) (string, error) {
	program := filepath.Join(dir, "hasp")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", program, "./cmd/hasp")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build hasp: %w\n%s", err, out)
	}
	return program, nil
}

// Page is a running "hasp ui", or another command that serves the page.
type Page struct {
	URL string
	cmd *exec.Cmd
}

// Serve starts program with args, and returns when it has printed the address of the page.
func Serve(ctx context.Context, program, store string, env []string, args ...string) (*Page, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), append([]string{"HASP_URL=" + store}, env...)...)
	if store == "" {
		cmd.Env = append(os.Environ(), env...)
	}
	cmd.Stderr = os.Stderr
	// hasp ends by Ctrl-C: it removes its files then.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}

	lines := bufio.NewScanner(out)
	for lines.Scan() {
		for word := range strings.FieldsSeq(lines.Text()) {
			if strings.HasPrefix(word, "http://") {
				go func() { // so that hasp can go on printing
					for lines.Scan() {
					}
				}()
				return &Page{URL: word, cmd: cmd}, nil
			}
		}
	}
	return nil, fmt.Errorf("%v printed no address: %w", args, cmd.Wait())
}

// Stop ends the program as Ctrl-C does, and returns its error.
func (p *Page) Stop() error {
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	return p.cmd.Wait()
}
