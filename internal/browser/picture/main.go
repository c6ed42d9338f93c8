// Command picture makes the pictures in docs of the page of "hasp ui", ui.png and ui-dark.png,
// and of "hasp ls --watch", ls.png. It needs a Chromium, a redis-server, script(1), and Go. Run
// it in internal/browser:
//
//	go run ./picture
package main

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/browser"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "hasp-picture-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program, err := browser.Build(ctx, "../..", dir)
	if err != nil {
		return err
	}
	store, err := startRedis(ctx, dir)
	if err != nil {
		return err
	}
	page, err := browser.Serve(ctx, program, store, nil, "ui", "--listen", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer page.Stop()
	tab, stop, err := browser.Start(ctx, filepath.Join(dir, "chromium"))
	if err != nil {
		return err
	}
	defer stop()
	if err := chromedp.Do(tab, chromedp.EmulateViewport(1160, 960), chromedp.Navigate(page.URL+"#"+"YmFja3Vw")); err != nil { // "backup"
		return err
	}
	if err := play(ctx, store); err != nil {
		return err
	}
	for scheme, file := range map[string]string{"light": "ui.png", "dark": "ui-dark.png"} {
		if err := take(tab, scheme, filepath.Join("..", "..", "docs", file)); err != nil {
			return err
		}
	}

	text, err := watch(ctx, program, store)
	if err != nil {
		return err
	}
	shell := "<body style='margin:0;background:#1c1f24;color:#e6e6e6'><pre style='margin:14px;font:15px/1.45 monospace'>$ hasp ls --watch\n" + html.EscapeString(text)
	if err := chromedp.Do(tab, chromedp.EmulateViewport(760, 250), chromedp.Navigate("data:text/html;charset=utf-8,"+url.PathEscape(shell))); err != nil {
		return err
	}
	return take(tab, "dark", filepath.Join("..", "..", "docs", "ls.png"))
}

// watch returns what a terminal of 80 columns shows after "hasp ls --watch" has run for a
// while.
func watch(ctx context.Context, program, store string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "script", "-qec", program+" ls --watch --every 500ms", os.DevNull)
	cmd.Env = append(os.Environ(), "HASP_URL="+store)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.Output()
	tables := control.Split(string(out), -1)
	if len(tables) < 3 {
		return "", fmt.Errorf("hasp ls --watch: %w: %q", err, out)
	}
	last := tables[len(tables)-2] // the one after it may be cut off
	return strings.NewReplacer("\r", "", "\x1b[K", "", "\x1b[J", "").Replace(last), nil
}

// control moves the cursor of a terminal to the beginning of the table.
var control = regexp.MustCompile(`\x1b\[\d+A`)

// startRedis starts a Redis that ends with ctx, and returns the URL of a store on it.
func startRedis(ctx context.Context, dir string) (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	ln.Close()
	cmd := exec.CommandContext(ctx, "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", dir)
	if err := cmd.Start(); err != nil {
		return "", err
	}
	context.AfterFunc(ctx, func() { _ = cmd.Wait() })
	for ctx.Err() == nil {
		if c, err := net.Dial("tcp", "127.0.0.1:"+port); err == nil {
			c.Close()
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	return "fairlock+redis://127.0.0.1:" + port, ctx.Err()
}

// play takes locks as programs do, for half a minute. The holder of one of them dies.
func play(ctx context.Context, store string) error {
	var failed error
	client := func(owner string) *hasp.Client {
		if failed != nil {
			return nil
		}
		var c *hasp.Client
		c, failed = hasp.Open(ctx, store, &hasp.Options{Owner: owner})
		return c
	}
	lock := func(c *hasp.Client, key string, o ...hasp.Option) *hasp.Lease {
		if failed != nil {
			return nil
		}
		var l *hasp.Lease
		l, failed = c.Lock(ctx, key, o...)
		return l
	}

	for i := 1; i <= 3 && failed == nil; i++ {
		lock(client(fmt.Sprintf("web%d/812/mailer", i)), fmt.Sprintf("mail:batch#%d", i), hasp.WithFence())
	}
	reports, readers := client("app2/95/reports"), client("app1/77/reports")
	lock(reports, "report:daily", hasp.WithShared())
	lock(readers, "report:daily", hasp.WithShared())
	lock(client("app1/31/migrate"), "schema", hasp.WithFence())
	if failed != nil {
		return failed
	}

	// Three hosts take turns at a backup, and the first one dies.
	hosts := []*hasp.Client{client("db1/4711/backup"), client("db2/390/backup"), client("db3/1204/backup")}
	if failed != nil {
		return failed
	}
	turns := make(chan error, len(hosts))
	lock(hosts[0], "backup", hasp.WithTTL(6*time.Second), hasp.WithoutRenewal())
	for _, c := range hosts[1:] {
		time.Sleep(time.Second)
		go func() {
			for _, hold := range []time.Duration{4 * time.Second, 5 * time.Second, time.Minute} {
				l, err := c.Lock(ctx, "backup", hasp.WithFence())
				if err != nil {
					turns <- err
					return
				}
				time.Sleep(hold)
				_ = l.Unlock(ctx)
			}
		}()
	}
	select {
	case err := <-turns:
		return err
	case <-time.After(28 * time.Second):
		return failed
	}
}

// take takes the picture in a colour scheme.
func take(tab context.Context, scheme, file string) error {
	_, err := chromedp.Call(tab, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	if err != nil {
		return err
	}
	shot, err := chromedp.Run(tab, chromedp.CaptureScreenshot())
	if err != nil {
		return err
	}
	whole, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		return err
	}

	// 256 colours are enough, and make the file small.
	few := image.NewPaletted(whole.Bounds(), colours(whole))
	draw.Draw(few, few.Bounds(), whole, image.Point{}, draw.Src)
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, few); err != nil {
		return err
	}
	fmt.Printf("%s: %d bytes\n", file, out.Len())
	return os.WriteFile(file, out.Bytes(), 0o644)
}

// colours returns the most frequent colours of a picture.
func colours(of image.Image) color.Palette {
	count := map[color.Color]int{}
	for y := of.Bounds().Min.Y; y < of.Bounds().Max.Y; y++ {
		for x := of.Bounds().Min.X; x < of.Bounds().Max.X; x++ {
			count[of.At(x, y)]++
		}
	}
	all := make(color.Palette, 0, len(count))
	for c := range count {
		all = append(all, c)
	}
	if len(all) <= 256 {
		return all
	}
	slices.SortFunc(all, func(a, b color.Color) int { return count[b] - count[a] })
	return all[:256]
}
