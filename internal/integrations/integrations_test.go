//go:build unix

package integrations

import (
	"database/sql"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/robfig/cron/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/memlock"
	_ "github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var must = await.Must

func open(t *testing.T, url string, o *hasp.Options) *hasp.Client {
	t.Helper()
	c := await.Value(hasp.Open(t.Context(), url, o))
	t.Cleanup(func() { c.Close() })
	return c
}

// store returns the URL of a Redis, with a prefix for the keys of one test.
func store(t *testing.T) string {
	return "spinlock+" + redistest.Start(t, nil).URL() + "?prefix=" + t.Name() + ":"
}

var goBlock = regexp.MustCompile("(?ms)^```go\n(.*?)^```$")

// Each block of Go code on the pages is in the source. Each page has at least the expected number
// of blocks.
func TestPagesShowTheCode(t *testing.T) {
	pages := map[string]int{"integrations": 6, "recipes": 5, "telemetry": 2, "drivers": 6}
	for name, least := range pages {
		page := await.Value(os.ReadFile("../../docs/" + name + ".md"))
		files := []string{name + ".go"}
		if name == "drivers" {
			files = []string{"rowlock/rowlock.go", "rowlock/rowlock_test.go"}
		}
		var code string
		for _, file := range files {
			text := await.Value(os.ReadFile(file))
			code += string(text)
		}
		blocks := goBlock.FindAllStringSubmatch(string(page), -1)
		if len(blocks) < least {
			t.Errorf("%s.md has %d blocks", name, len(blocks))
		}
		for _, b := range blocks {
			if !strings.Contains(code, b[1]) {
				t.Errorf("this block is not in %v:\n%s", files, b[1])
			}
		}
	}
}

// Package gocronhasp tests what a Locker and an Elector do. This test finds that gocron accepts
// the schedules of the page.
func TestGocronAcceptsTheSchedules(t *testing.T) {
	t.Parallel()
	c := open(t, store(t), nil)
	once := await.Value(scheduleOnce(c, func() {}))
	must(t, once.Shutdown())

	s, elector, err := scheduleOnLeader(t.Context(), c)
	must(t, err)
	must(t, s.Shutdown())
	must(t, elector.Close())
}

// Three processes, which have started at different times, run the job once in each period.
func TestGocronDurationJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const period = time.Minute
		var store memlock.Store
		runs := make(chan bool, 100)
		for range 3 {
			c := await.Value(hasp.New(store.Driver(), nil))
			defer c.Close()
			s := await.Value(scheduleEvery(c, period, func() { runs <- true }))
			defer s.Shutdown()
			s.Start()
			time.Sleep(period / 3)
		}
		time.Sleep(period / 6) // between two ticks
		before := len(runs)
		time.Sleep(10 * period)
		if n := len(runs) - before; n != 10 {
			t.Errorf("%d runs in 10 periods", n)
		}
	})
}

// Two processes want to run a job at each tick. The second clock is behind.
func TestRobfigCron(t *testing.T) {
	t.Parallel()
	url := store(t)
	runs := 0
	var processes []cron.Job
	for range 2 {
		chain := cron.NewChain(once(open(t, url, nil), "report", 500*time.Millisecond,
			cron.DefaultLogger))
		processes = append(processes, chain.Then(cron.FuncJob(func() { runs++ })))
	}
	for tick := range 2 {
		for _, p := range processes {
			p.Run()
		}
		if runs != tick+1 {
			t.Errorf("%d runs in %d ticks", runs, tick+1)
		}
		time.Sleep(600 * time.Millisecond)
	}
}

func TestHTTP(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Own)
	c := open(t, "spinlock+"+srv.URL(), &hasp.Options{Timeout: 500 * time.Millisecond})
	entered := make(chan bool)
	leave := make(chan bool)
	h := exclusive(c, func(r *http.Request) string {
		return r.URL.Path
	}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		entered <- true
		<-leave
	}))
	get := func() *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/orders/7", nil))
		return w
	}

	first := make(chan int)
	go func() { first <- get().Code }()
	<-entered
	if code := get().Code; code != http.StatusConflict {
		t.Errorf("while another request is served: got %d, want 409", code)
	}
	leave <- true
	if code := <-first; code != http.StatusOK {
		t.Errorf("the first request: got %d, want 200", code)
	}
	go func() { first <- get().Code }()
	await.Return(t, "the key is free again", func() { <-entered })
	leave <- true
	if code := <-first; code != http.StatusOK {
		t.Errorf("the next request: got %d, want 200", code)
	}

	srv.Kill()
	if w := get(); w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
		t.Errorf("without a store: got %d, want 503 with Retry-After", w.Code)
	}
}

func connect(t *testing.T, driver, url string) *sql.DB {
	t.Helper()
	db := await.Value(sql.Open(driver, url))
	t.Cleanup(func() { db.Close() })
	return db
}

// The first migration is slow, so that another caller comes while it runs.
var files fs.FS = fstest.MapFS{
	"00001_a.sql": {Data: []byte("-- +goose Up\nCREATE TABLE a (x int);\nSELECT pg_sleep(1);\n")},
	"00002_b.sql": {Data: []byte("-- +goose Up\nINSERT INTO a VALUES (1);\n")},
}

func TestGoose(t *testing.T) {
	t.Parallel()
	url := pgtest.Start(t).URL()
	locks := store(t)
	applied := make(chan int)
	for range 3 {
		c := open(t, locks, nil)
		db := connect(t, "pgx", url)
		go func() {
			results, err := migrate(t.Context(), c, db, files)
			if err != nil {
				t.Error(err)
			}
			applied <- len(results)
		}()
	}
	if n := <-applied + <-applied + <-applied; n != 2 {
		t.Errorf("three callers applied %d migrations, want 2", n)
	}
}
