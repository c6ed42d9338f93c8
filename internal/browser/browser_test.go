// Package browser tests the page of "hasp ui" in a real Chromium.
package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/cli/ui"
	"github.com/hasplock/hasp/internal/redistest"
)

// chromium is the context of the browser that all tests share. It is nil if no Chromium is
// installed.
var chromium context.Context

func TestMain(m *testing.M) { os.Exit(run(m)) }

// run runs the tests. If HASP_TEST_CHROMIUM is "required", a missing Chromium is a failure.
func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "hasp-browser-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)

	for _, name := range []string{
		"chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
	} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path),
			chromedp.UserDataDir(filepath.Join(dir, "profile")), chromedp.Env("TMPDIR="+dir),
			chromedp.WindowSize(1200, 900))
		if os.Getuid() == 0 {
			options = append(options, chromedp.NoSandbox) // needed as root
		}
		all, stopAll := chromedp.NewExecAllocator(context.Background(), options...)
		defer stopAll()
		first, stopFirst := chromedp.NewContext(all)
		defer stopFirst()
		if err := chromedp.Do(first); err != nil {
			fmt.Fprintf(os.Stderr, "start %s: %v\n", path, err)
			return 1
		}
		chromium = first
		break
	}
	if chromium == nil && os.Getenv("HASP_TEST_CHROMIUM") == "required" {
		fmt.Fprintln(os.Stderr, "no Chromium is installed")
		return 1
	}
	return redistest.Main(m)
}

func needChromium(t *testing.T) {
	t.Helper()
	if chromium == nil {
		t.Skip("no Chromium is installed: apt-get install chromium")
	}
}

// serve serves the page of a store, as hasp ui does, until the end of the test or a call of stop.
func serve(t *testing.T, store, listen, token string) (url string, stop func()) {
	t.Helper()
	needChromium(t)
	ln := await.Value(net.Listen("tcp", listen))
	ctx, end := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	server := ui.New(client(t, store, ""),
		ui.Options{Ordered: true, Token: token, Listen: ln.Addr().String()})
	go func() { ended <- server.Serve(ctx, ln) }()
	stop = sync.OnceFunc(func() { end(); must(t, <-ended) })
	t.Cleanup(stop)
	return "http://" + ln.Addr().String() + "/", stop
}

// redisStore returns the URL of fairlock on a Redis that no other test uses.
func redisStore(t *testing.T) string {
	t.Helper()
	needChromium(t)
	return "fairlock+" + redistest.Start(t, redistest.Own).URL()
}

// show serves the page of a store on a free port, and returns its address.
func show(t *testing.T, store string) string {
	t.Helper()
	url, _ := serve(t, store, "127.0.0.1:0", "")
	return url
}

type tab struct {
	*testing.T
	ctx context.Context
}

func open(t *testing.T, url string) tab {
	t.Helper()
	needChromium(t)
	ctx, stop := chromedp.NewContext(chromium)
	t.Cleanup(stop)
	b := tab{t, ctx}
	b.visit(url)
	return b
}

func (b tab) visit(url string) { b.Helper(); must(b.T, chromedp.Do(b.ctx, chromedp.Navigate(url))) }

// eval returns the value of a JavaScript expression.
func eval[V any](b tab, script string) V {
	b.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[V](script))
	if err != nil {
		b.Fatalf("%s: %v", script, err)
	}
	return v
}

// until waits until a JavaScript expression is true.
func (b tab) until(script string) {
	b.Helper()
	await.Success(b.T, script, func() error {
		if !eval[bool](b, script) {
			return errors.New("the page:\n" + eval[string](b, "document.body.innerText"))
		}
		return nil
	})
}

// shows waits until the element with an ID shows a text.
func (b tab) shows(id, text string) {
	b.Helper()
	b.until(fmt.Sprintf("document.getElementById(%s).textContent.includes(%s)", quote(id),
		quote(text)))
}

// press presses keys.
func (b tab) press(keys string) {
	b.Helper()
	must(b.T, chromedp.Do(b.ctx, chromedp.KeyEvent(keys)))
}

// prefer sets the colour scheme of the system to light or dark.
func (b tab) prefer(scheme string) {
	b.Helper()
	await.Value(chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	}))
}

func quote(s string) string { text, _ := json.Marshal(s); return string(text) }

// cell returns a JavaScript expression: the text of a cell in the first row whose key contains key.
func cell(key string, column int) string {
	return fmt.Sprintf(`([...document.querySelectorAll("#rows tr")].find((r) => r.children[0].textContent.includes(%s))?.children[%d].textContent ?? "")`, quote(key), column)
}

var must = await.Must

func client(t *testing.T, store, owner string) *hasp.Client {
	t.Helper()
	c := await.Value(hasp.Open(t.Context(), store, &hasp.Options{Owner: owner}))
	t.Cleanup(func() { c.Close() })
	return c
}

func lock(t *testing.T, c *hasp.Client, key string, o ...hasp.Option) *hasp.Lease {
	t.Helper()
	l := await.Value(c.Lock(t.Context(), key, o...))
	// Unlock before the Client's Close, which waits for holders. Ignore the error, because the test
	// may have unlocked or lost the lease.
	t.Cleanup(func() { _ = l.Unlock(context.Background()) })
	return l
}

// The page shows a key that is taken, a hand-over, and that a dead holder loses the key.
func TestPageFollowsTheStore(t *testing.T) {
	store := redisStore(t)
	b := open(t, show(t, store))
	b.shows("status", "live")
	b.until("!document.getElementById('empty').hidden")

	one := client(t, store, "owner one")
	two := client(t, store, "owner two")
	lease := lock(t, one, "backup", hasp.WithFence())
	b.until(cell("backup", 1) + ` === "owner one"`)
	b.until(cell("backup", 4) + ` === ` + quote(fmt.Sprint(lease.Fence())))

	second := make(chan *hasp.Lease, 1)
	go func() { l, _ := two.Lock(t.Context(), "backup"); second <- l }()
	b.until(cell("backup", 5) + ` === "1"`)
	eval[any](b, `document.querySelector("#rows td").click()`) // any cell of the row
	b.shows("queue", "owner two")
	b.shows("queue-title", "in order")

	must(t, lease.Unlock(t.Context()))
	b.until(cell("backup", 1) + ` === "owner two"`)
	// The story shows the latest event first. The release comes before the next holder gets the
	// key.
	b.until(`/owner two gets the key after waiting .*owner one releases the key after .*owner one holds the key/.test(document.getElementById("story").textContent)`)
	b.until(`document.querySelectorAll("#timeline .holds").length === 2 && document.querySelectorAll("#timeline .waits").length === 1`)
	must(t, (<-second).Unlock(t.Context()))
	b.until(`document.querySelectorAll("#rows tr").length === 0`)

	// A holder that does not renew looks like one that has died. If the machine stands still when
	// its term ends, the page cannot know whether the holder unlocked. Then try again with another
	// hold.
	for tries := 0; ; tries++ {
		lock(t, one, "backup", hasp.WithTTL(4*time.Second), hasp.WithoutRenewal())
		b.shows("detail-state", "does not renew")
		b.until(`document.querySelectorAll("#rows tr").length === 0`)
		if tries == 5 || eval[bool](b, `document.getElementById("story").textContent.includes("owner one lost the key")`) {
			break
		}
	}
	b.shows("story", "owner one lost the key")
	b.until(`document.querySelectorAll("#timeline .lost").length >= 1`)
}

func TestPageShowsAnOutageAndRecovers(t *testing.T) {
	needChromium(t)
	srv := redistest.Start(t, redistest.Own)
	store := "fairlock+" + srv.URL()
	b := open(t, show(t, store)+"#"+ui.ID("kept")) // the address selects the key
	c := client(t, store, "holder")
	lock(t, c, "kept", hasp.WithTTL(10*time.Minute))
	b.until(cell("kept", 1) + ` === "holder"`)

	must(t, srv.Stop())
	b.shows("status", "outage since ")
	if got := eval[string](b, cell("kept", 1)); got != "holder" {
		t.Errorf("during the outage the page shows %q", got)
	}
	if !eval[bool](b, `document.body.classList.contains("stale") && document.title.startsWith("⚠")`) {
		t.Error("nothing says that the page is old")
	}
	must(t, srv.Start(true))
	b.shows("status", "live")
	b.shows("story", "outage: nothing is known")
	b.until(`!document.body.classList.contains("stale")`)
}

// When the server ends and starts again, the page goes on with its token.
func TestPageConnectsAgainWithItsToken(t *testing.T) {
	const token = "a-token-of-some-length"
	store := "filelock://" + t.TempDir()
	page, stop := serve(t, store, "127.0.0.1:0", token)
	b := open(t, page)
	if got := eval[string](b, "document.body.innerText"); !strings.Contains(got, "a token is needed") {
		t.Errorf("without the token: %q", got)
	}
	b.visit(page + "?token=" + token)
	b.shows("status", "live")
	if got := eval[string](b, "location.href + document.cookie + JSON.stringify(localStorage)"); strings.Contains(got, "token") || strings.Contains(got, "hasp_ui") {
		t.Errorf("scripts see the token: %s", got)
	}
	b.visit(page) // now the cookie is enough
	b.shows("status", "live")

	stop()
	b.shows("status", "not connected")
	serve(t, store, strings.Trim(page, "htp:/"), token)
	b.shows("status", "live")
}

func TestHostileKeysStayText(t *testing.T) {
	store := redisStore(t)
	const image = `<img src=x onerror="window.pwned=1">`
	hostile := []string{
		image, `"><script>window.pwned=1</script>`, `</script><svg onload=window.pwned=1>`,
		"javascript:window.pwned=1",
		"\x1b[2J\u202ereversed", "{{constructor.constructor('window.pwned=1')()}}", "\xff\xfe",
		"data: x\n\nevent: y", "__proto__",
	}
	b := open(t, show(t, store))
	eval[any](b, `document.addEventListener("securitypolicyviolation", () => { window.violated = true }), 0`)
	for i, text := range hostile {
		lock(t, client(t, store, text), text)
		waiter := client(t, store, fmt.Sprint(text, i))
		go func() { _, _ = waiter.Lock(t.Context(), text) }()
	}
	b.until(fmt.Sprintf(`[...document.querySelectorAll("#rows tr")].filter((r) => r.children[5].textContent === "1").length === %d`, len(hostile)))
	for i := range hostile {
		eval[any](b, fmt.Sprintf(`document.querySelectorAll("#rows button")[%d].click()`, i))
		b.until(fmt.Sprintf(`document.getElementById("detail-key").textContent === document.querySelectorAll("#rows button")[%d].textContent && document.getElementById("queue").children.length === 1`, i))
		b.until(`document.querySelectorAll("#timeline .waits").length === 1`)
	}
	if got := eval[string](b, `document.body.innerText`); !strings.Contains(got, "<script>window.pwned=1") || strings.ContainsAny(got, "\x1b\u202e") {
		t.Errorf("the page shows:\n%s", got)
	}
	if eval[bool](b, `window.pwned === 1 || window.violated === true || document.querySelectorAll("main img, main script, main svg svg").length > 0`) {
		t.Error("a key became markup")
	}

	// Even if the page itself made markup of a text, the browser would refuse.
	if !eval[bool](b, `(() => { try { document.body.innerHTML = "<b>x</b>"; return false } catch { return true } })()`) {
		t.Error("the page's policy lets text become markup")
	}
}

func TestKeyboardAndScreenReader(t *testing.T) {
	store := redisStore(t)
	c := client(t, store, "owner")
	for _, key := range []string{"a", "b", "c"} {
		lock(t, c, key)
	}
	b := open(t, show(t, store))
	b.until(`document.querySelectorAll("#rows tr").length === 3`)

	// Send the event by a script, because chromedp types the letter even if the page has handled
	// its key.
	eval[any](b, `document.dispatchEvent(new KeyboardEvent("keydown", { key: "/" }))`)
	b.press("b")
	b.until(`document.querySelectorAll("#rows tr").length === 1 && document.activeElement.id === "filter"`)
	b.shows("count", "1 of 3 keys")
	for range 12 { // as many tabs as there are elements before the key
		b.press("\t")
		if eval[bool](b, `document.activeElement.textContent === "b"`) {
			break
		}
	}
	b.press("\r")
	b.until(`document.activeElement.id === "detail-key"`)
	b.until(`getComputedStyle(document.activeElement).outlineStyle !== "none"`)
	b.press("\x1b")
	b.until(`document.getElementById("detail").hidden && document.activeElement.textContent === "b"`)

	const order = `[...document.querySelectorAll("#rows th")].map((e) => e.textContent).join("")`
	eval[any](b, `document.getElementById("filter").value = "", document.getElementById("filter").dispatchEvent(new Event("input"))`)
	b.until(order + ` === "abc"`)
	eval[any](b, `document.querySelector("[data-sort=key]").click()`)
	b.until(order + ` === "cba"`)
	if got := eval[string](b, `[...document.querySelectorAll("#locks thead th")].map((e) => e.getAttribute("aria-sort") ?? "").join()`); got != "descending,,,,," {
		t.Errorf("aria-sort: %s", got)
	}
	// A new list does not take the focus away.
	eval[any](b, `document.querySelector("#rows button").focus()`)
	l := lock(t, c, "d")
	b.until(order + ` === "dcba"`)
	if !eval[bool](b, `document.activeElement.textContent === "c"`) {
		t.Error("the focus is gone")
	}
	must(t, l.Unlock(t.Context()))

	// Every control and table has a name.
	if got := eval[string](b, `[...document.querySelectorAll("button:not([hidden]), select, input")].filter((e) => !(e.textContent || e.labels?.length)).map((e) => e.outerHTML).join()`); got != "" {
		t.Errorf("without a name: %s", got)
	}
	if !eval[bool](b, `document.querySelector("#locks caption").textContent !== "" && document.getElementById("status").getAttribute("aria-live") === "polite" && document.documentElement.lang === "en"`) {
		t.Error("the table has no caption, or the status is not announced")
	}
}

// All columns can be seen even on a narrow screen, with long names. No row grows if its holder does
// not renew.
func TestLightDarkAndNarrow(t *testing.T) {
	store := redisStore(t)
	lock(t, client(t, store, strings.Repeat("owner", 20)), strings.Repeat("key", 40),
		hasp.WithFence())
	lock(t, client(t, store, "me"), "k")
	page := show(t, store)
	b := open(t, page)
	const back = `getComputedStyle(document.body).backgroundColor`
	b.prefer("light")
	b.until(back + ` === "rgb(255, 255, 255)"`)
	b.prefer("dark")
	b.until(back + ` === "rgb(13, 17, 23)"`)
	eval[any](b, `document.getElementById("theme").value = "light", document.getElementById("theme").dispatchEvent(new Event("change"))`)
	b.until(back + ` === "rgb(255, 255, 255)"`)
	b.visit(page)
	b.until(back + ` === "rgb(255, 255, 255)"`)

	must(t, chromedp.Do(b.ctx, chromedp.EmulateViewport(400, 900)))
	b.until(`document.querySelectorAll("#rows tr").length === 2`)
	b.until(`[...document.querySelectorAll("#rows tr")].every((row) => {
		const heights = ["9.9s", "59m59s, not renewed"].map((left) => (row.children[3].textContent = left, row.offsetHeight));
		return heights[0] === heights[1];
	})`)
	b.until(`[...document.querySelectorAll("#locks th, #locks td")].every((e) => e.getBoundingClientRect().right <= 400 && e.scrollWidth <= e.clientWidth)`)
	eval[any](b, `document.querySelector("#rows button").click()`)
	b.until(`[...document.querySelectorAll("#timeline text")].some((e) => e.textContent === "now" && e.getBoundingClientRect().right <= 400 && e.getScreenCTM().a > 0.99)`)
}
