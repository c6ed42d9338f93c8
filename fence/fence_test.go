package fence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence"
	"github.com/hasplock/hasp/fence/filefence"
	"github.com/hasplock/hasp/fence/redisfence"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/memlock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var must = await.Must

// guard appends words to a log, under a guard of package fence.
type guard struct {
	write func(ctx context.Context, word string) error
	log   func() []string

	// oneStep says that the guard raises its fence and writes in one step. Other guards raise the
	// fence first.
	oneStep bool
}

// dying is a word whose writer dies when the word is in the log.
const dying = "dying"

var writing atomic.Bool

// add calls the function write with a word. It fails if another add is at work. If the word is
// dying, it panics.
func add(word string, write func(word string) error) error {
	if !writing.CompareAndSwap(false, true) {
		return errors.New("two writes at the same time")
	}
	defer writing.Store(false)
	time.Sleep(time.Millisecond)
	err := write(word)
	if word == dying {
		panic(http.ErrAbortHandler) // which a server does not log
	}
	return err
}

// addTo appends a word to a file.
func addTo(path, word string) error {
	return add(word, func(word string) error {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = f.WriteString(word + "\n")
		return errors.Join(err, f.Close())
	})
}

func words(path string) []string {
	text, _ := os.ReadFile(path)
	return strings.Fields(string(text))
}

// guards returns a guard of each kind. The log is the file at path, the list of that name in a
// Redis, or of a service at the URL web.
func guards(path, server, web string) map[string]guard {
	var memory fence.Memory
	rdb := redis.NewClient(await.Value(redis.ParseURL(server)))
	client := &http.Client{Transport: fence.Transport{}}
	return map[string]guard{
		"memory": {
			write: func(ctx context.Context, word string) error {
				return memory.Do(ctx, path, func(context.Context) error {
					return addTo(path+".memory", word)
				})
			},
			log: func() []string { return words(path + ".memory") },
		},
		"file": {
			write: func(ctx context.Context, word string) error {
				return filefence.Do(ctx, path, func(context.Context) error { return addTo(path, word) })
			},
			log: func() []string { return words(path) },
		},
		"redis": {
			write: func(ctx context.Context, word string) error {
				return redisfence.Do(ctx, rdb, path+":fence", func(p redis.Pipeliner) error {
					if word == dying {
						panic("before the transaction is sent")
					}
					return p.RPush(ctx, path, word).Err()
				})
			},
			log:     func() []string { return rdb.LRange(context.Background(), path, 0, -1).Val() },
			oneStep: true,
		},
		"http": {
			write: func(ctx context.Context, word string) error {
				return post(ctx, client, web+"?word="+word)
			},
			log: func() []string { return words(path + ".web") },
		},
		"PostgreSQL": sqlGuard(fence.SQL{}),
		"MySQL":      sqlGuard(fence.SQL{MySQL: true}),
	}
}

func post(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode == http.StatusPreconditionRequired {
		return fence.ErrNone
	}
	return nil
}

func sqlGuard(s fence.SQL) guard {
	fake := &database{}
	db := fake.open()
	return guard{
		write: func(ctx context.Context, word string) error {
			return s.Do(ctx, db, "log", func(ctx context.Context, tx *sql.Tx) error {
				return add(word, func(word string) error {
					_, err := tx.ExecContext(ctx, "INSERT INTO log", word)
					return err
				})
			})
		},
		log:     fake.words,
		oneStep: true,
	}
}

// resources returns the arguments of guards: new resources.
func resources(t *testing.T) (path, server, web string) {
	path = filepath.Join(t.TempDir(), "log")
	memory := new(fence.Memory)
	service := func(w http.ResponseWriter, r *http.Request) {
		write := func(context.Context) error { return addTo(path+".web", r.FormValue("word")) }
		serve(t, memory, "log", write)(w, r)
	}
	srv := httptest.NewServer(fence.Handler(http.HandlerFunc(service)))
	t.Cleanup(srv.Close)
	return path, redistest.Start(t, nil).URL(), srv.URL
}

// serve returns a service that writes under a guard in its memory.
func serve(
	t *testing.T, m *fence.Memory, resource string, write func(context.Context) error,
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := m.Do(r.Context(), resource, write); err != nil && !fence.Refuse(w, err) {
			t.Error(err)
		}
	}
}

func client(t *testing.T, s *memlock.Store) *hasp.Client {
	o := &hasp.Options{Timeout: 10 * time.Millisecond} // so that Close does not wait for leases
	c := await.Value(hasp.New(s.Driver(), o))
	t.Cleanup(func() { c.Close() })
	return c
}

// A write that is in the log has raised the fence, even if its process dies in the middle.
func TestLateWriteIsRefused(t *testing.T) {
	for kind, g := range guards(resources(t)) {
		t.Run(kind, func(t *testing.T) {
			write := func(ctx context.Context, word string) (err error) {
				defer func() {
					if r := recover(); r != nil {
						err = fmt.Errorf("died: %v", r)
					}
				}()
				return g.write(ctx, word)
			}
			ctx, store := t.Context(), new(memlock.Store)
			first, err := client(t, store).Lock(ctx, "k", hasp.WithFence(), hasp.WithoutRenewal(),
				hasp.WithTTL(100*time.Millisecond))
			must(t, err)
			late := context.WithoutCancel(first.Context()) // of a write that was sent before the loss
			must(t, write(late, "one"))

			// This lock comes when the first term has ended.
			second := await.Value(client(t, store).Lock(ctx, "k", hasp.WithFence()))
			must(t, write(second.Context(), "two"))

			err = write(late, dying) // must not begin
			var stale *fence.StaleError
			isLoss := errors.Is(err, fence.ErrStale) && errors.Is(err, hasp.ErrLost)
			if !errors.As(err, &stale) || !isLoss {
				t.Fatalf("the late write returned %v", err)
			}
			isWhole := stale.Fence == first.Fence() && stale.Seen == second.Fence()
			if !isWhole || stale.Resource == "" {
				t.Errorf("the late write returned %+v", stale)
			}
			must(t, write(second.Context(), "three")) // the same fence may write again
			if err := write(ctx, "none"); !errors.Is(err, fence.ErrNone) {
				t.Errorf("without a lease: %v", err)
			}

			dies := fence.With(ctx, second.Fence()+2)
			if err := write(dies, dying); err == nil || errors.Is(err, fence.ErrStale) {
				t.Errorf("a write that dies: %v", err)
			}
			want := []string{"one", "two", "three"}
			if !g.oneStep {
				want = append(want, dying)
			}
			if got := g.log(); !slices.Equal(got, want) {
				t.Errorf("the log is %q, want %q", got, want)
			}
			smaller := fence.With(ctx, second.Fence()+1)
			if err := write(smaller, "smaller"); errors.Is(err, fence.ErrStale) == g.oneStep {
				t.Errorf("a smaller fence after the write that died: %v", err)
			}
		})
	}
}

// The check and the write are one step: of writes at the same time, no write follows one with a
// larger fence.
func TestFencesOfWritesNeverDecrease(t *testing.T) {
	for kind, g := range guards(resources(t)) {
		t.Run(kind, func(t *testing.T) {
			const most = 8
			var all sync.WaitGroup
			for f := range most {
				all.Go(func() {
					ctx := fence.With(t.Context(), uint64(f+1))
					for range 20 {
						err := g.write(ctx, fmt.Sprint(f+1))
						if err != nil && !errors.Is(err, fence.ErrStale) {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()

			log := g.log()
			if !slices.IsSorted(log) || len(log) < 20 || log[len(log)-20] != fmt.Sprint(most) {
				t.Errorf("the log is %v", log)
			}
		})
	}
}

// nothing is a write that writes nothing.
func nothing(context.Context) error { return nil }

func TestOf(t *testing.T) {
	c := client(t, new(memlock.Store))
	lock := func(ctx context.Context, key string, opts ...hasp.Option) *hasp.Lease {
		return await.Value(c.Lock(ctx, key, append(opts, hasp.WithFence())...))
	}
	all := func(keys ...string) *hasp.Leases {
		return await.Value(hasp.LockAll(t.Context(), c, keys, hasp.WithFence()))
	}
	outer := lock(t.Context(), "outer")
	inner := lock(outer.Context(), "inner")
	request := fence.With(outer.Context(), 1)
	deep := lock(request, "deep")
	again := lock(outer.Context(), "outer", hasp.WithShared())
	one := all("e")
	plain := await.Value(c.Lock(outer.Context(), "plain"))

	for name, test := range map[string]struct {
		ctx  context.Context
		want uint64
		err  error
	}{
		"no lease":                 {t.Context(), 0, fence.ErrNone},
		"without WithFence":        {plain.Context(), 0, fence.ErrNone},
		"nested":                   {inner.Context(), inner.Fence(), nil},
		"the outer one":            {outer.Context(), outer.Fence(), nil},
		"of a request":             {request, 1, nil},
		"a lease further in":       {deep.Context(), deep.Fence(), nil},
		"shared":                   {lock(t.Context(), "shared", hasp.WithShared()).Context(), 0, hasp.ErrInvalid},
		"joined an exclusive hold": {again.Context(), outer.Fence(), nil},
		"two of LockAll":           {all("a", "b").Context(), 0, hasp.ErrInvalid},
		"one of LockAll":           {one.Context(), one.All()[0].Fence(), nil},
	} {
		if got, err := fence.Of(test.ctx); !errors.Is(err, test.err) || got != test.want {
			t.Errorf("%s: got %d, %v, want %d, %v", name, got, err, test.want, test.err)
		}
	}
}

// If the number of a guard is none, the guard refuses the write, and says why.
func TestFenceThatIsNoNumber(t *testing.T) {
	path, server, web := resources(t)
	must(t, os.WriteFile(path+".fence", []byte("seven"), 0o600))
	rdb := redis.NewClient(await.Value(redis.ParseURL(server)))
	must(t, rdb.Set(t.Context(), path+":fence", "seven", 0).Err())
	all := guards(path, server, web)
	for _, kind := range []string{"file", "redis"} {
		err := all[kind].write(fence.With(t.Context(), 9), "word")
		isOther := err == nil || errors.Is(err, fence.ErrStale)
		if isOther || !strings.Contains(err.Error(), "no fence") || len(all[kind].log()) > 0 {
			t.Errorf("%s: %v, wrote %v", kind, err, all[kind].log())
		}
	}
}

func TestMemoryWaitsForItsTurn(t *testing.T) {
	var m fence.Memory
	ctx, cancel := context.WithCancelCause(fence.With(t.Context(), 5))
	why := errors.New("why")
	must(t, m.Do(ctx, "r", func(context.Context) error {
		must(t, m.Do(ctx, "another", nothing))
		cancel(why)
		for i := range 40 { // if a turn is free as well, chance must not decide
			if err := m.Do(ctx, []string{"r", "free"}[i%2], nothing); err != why {
				t.Errorf("a wait whose context ends returns %v", err)
			}
		}
		return nil
	}))
}

func TestFileOfADirectory(t *testing.T) {
	dir := t.TempDir()
	must(t, filefence.Do(fence.With(t.Context(), 7), dir, nothing))
	await.ErrorIs(t, "with a slash at the end",
		filefence.Do(fence.With(t.Context(), 6), dir+"/", nothing), fence.ErrStale)
}

func TestHandler(t *testing.T) {
	var m fence.Memory
	must(t, m.Do(fence.With(t.Context(), 7), "r", nothing))
	for _, test := range []struct {
		fences []string
		want   int
	}{
		{nil, 428},
		{[]string{""}, 400},
		{[]string{"seven"}, 400},
		{[]string{"-7"}, 400},
		{[]string{"0"}, 400},
		{[]string{"7", "8"}, 400},
		{[]string{"99999999999999999999"}, 400},
		{[]string{"6"}, 412},
		{[]string{"7"}, 200},
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), "PUT", "/r", nil)
		r.Header["Fence"] = test.fences
		fence.Handler(serve(t, &m, "r", nothing)).ServeHTTP(w, r)
		seen := w.Header().Get("Fence")
		if w.Code != test.want || (w.Code == 412) != (seen == "7") {
			t.Errorf("fences %q: got %d, fence %q, want %d", test.fences, w.Code, seen, test.want)
		}
	}
	if fence.Refuse(httptest.NewRecorder(), errors.New("another error")) {
		t.Error("Refuse answers another error")
	}
}

func TestTransport(t *testing.T) {
	var got []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Header.Get("Fence"))
		w.WriteHeader(http.StatusPreconditionFailed) // for a reason of its own
	}))
	defer srv.Close()
	web := &http.Client{Transport: fence.Transport{Base: http.DefaultTransport}}
	for _, ctx := range []context.Context{t.Context(), fence.With(t.Context(), 7)} {
		req := await.Value(http.NewRequestWithContext(ctx, "PUT", srv.URL, nil))
		must(t, await.Value(web.Do(req)).Body.Close())
		if len(req.Header) > 0 {
			t.Errorf("the caller's request has got a header: %v", req.Header)
		}
	}
	if fmt.Sprintf("%q", got) != `["" "7"]` {
		t.Errorf("the fences are %q", got)
	}

	locks := client(t, new(memlock.Store))
	shared := await.Value(locks.Lock(t.Context(), "k", hasp.WithFence(), hasp.WithShared()))
	body := &body{Reader: strings.NewReader("x")}
	req := await.Value(http.NewRequestWithContext(shared.Context(), "PUT", srv.URL, body))
	if _, err := web.Do(req); !errors.Is(err, hasp.ErrInvalid) || len(got) > 2 || !body.closed {
		t.Errorf("with a shared lease: %v, body closed: %t", err, body.closed)
	}
}

type body struct {
	io.Reader
	closed bool
}

func (b *body) Close() error { b.closed = true; return nil }
