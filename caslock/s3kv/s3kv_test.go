package s3kv_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/s3kv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// at returns the URL of the bucket of the server at an address.
func at(addr, params string) string {
	return "s3://bucket/locks?endpoint=http://" + addr + "&" + params
}

// open opens the driver that a user gets by a URL.
func open(ctx context.Context, addr, params string) (backend.Driver, error) {
	c, err := hasp.ParseURL(at(addr, params))
	if err != nil {
		return nil, err
	}
	return c.Driver(ctx)
}

// onTerms has the clauses that a clock of the store may change.
var onTerms = regexp.MustCompile(
	"^(takes|acquire|expiry|deadline|process|wait-d|keep|fence-g|list-held|history-driver)")

func TestConformance(t *testing.T) {
	for _, clock := range []bool{false, true} {
		t.Run("clock="+strconv.FormatBool(clock), func(t *testing.T) {
			t.Parallel()
			var s *server
			conformance.Run(t, conformance.Harness{
				Store: func(context.Context) (string, func(), error) {
					s = startServer(t)
					return s.addr, nil, nil
				},
				Open: func(ctx context.Context, addr string) (backend.Driver, error) {
					return open(ctx, addr, "clock="+strconv.FormatBool(clock))
				},
				Cannot: map[string]string{
					"keys-long": "versitygw replaces an object by a file with a longer name, for which " +
						"the name is too long",
				},
				Only: func(clause string) bool { return !clock || onTerms.MatchString(clause) },
				Link: func(_ context.Context, addr string) (*conformance.Link, error) {
					return conformance.TCP(addr)
				},
				Stop: func(context.Context, string) error { s.kill(); return nil },
				Start: func(_ context.Context, _ string, data bool) error {
					if !data {
						s.clear(t)
					}
					return s.start()
				},
				Kick: func(context.Context, string) error { s.kill(); return s.start() },
			})
		})
	}
}

// store returns a Store in the bucket of s.
func store(s *server) *s3kv.Store {
	return await.Value(s3kv.New(s.client(), "bucket", "locks/", false))
}

// Of writers that meet at one version, one wins.
func TestAtomic(t *testing.T) {
	t.Parallel()
	s := store(startServer(t))
	version := ""
	for round := range 30 {
		errs := make([]error, 8)
		versions := make([]string, len(errs))
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				versions[i], errs[i] = s.Put(t.Context(), "key", fmt.Append(nil, round, i), version)
			})
		}
		wg.Wait()

		winner := slices.Index(errs, nil)
		for i, err := range errs {
			if i != winner && !errors.Is(err, caslock.ErrConflict) {
				t.Fatalf("round %d: writer %d: %v, and writer %d has won", round, i, err, winner)
			}
		}
		if winner < 0 {
			t.Fatalf("round %d: no writer has won", round)
		}
		version = versions[winner]
	}
}

func claim(key string) backend.Claim {
	return backend.Claim{Key: key, Token: "token", TTL: time.Minute, Timeout: 10 * time.Second}
}

func TestObjects(t *testing.T) {
	t.Parallel()
	real, ctx := startServer(t), t.Context()
	s := store(real)
	d := await.Value(open(ctx, real.addr, ""))
	clock := await.Value(open(ctx, real.addr, "clock=true"))

	// Equal values have equal ETags, but caslock writes no value twice, even for the same claim.
	one := await.Value(s.Put(ctx, "equal", []byte("equal"), ""))
	if two := await.Value(s.Put(ctx, "equal", []byte("equal"), one)); one != two {
		t.Errorf("equal values have other ETags: %s, %s", one, two)
	}
	seen := map[string]bool{}
	for range 10 {
		await.Value(d.Acquire(ctx, claim("key")))
		held := await.Value(s.Get(ctx, "key")).Version
		await.Must(t, d.Release(ctx, claim("key")))
		free := await.Value(s.Get(ctx, "key")).Version
		if seen[held] || seen[free] || held == free {
			t.Errorf("an ETag comes twice: %s, %s", held, free)
		}
		seen[held] = true
		seen[free] = true
	}

	// A hold ages by the clock of the store, if it has one.
	await.Value(d.Acquire(ctx, claim("old")))
	file := filepath.Join(real.dir, "bucket", "locks", "old.json")
	await.Must(t, os.Chtimes(file, time.Time{}, time.Now().Add(-time.Hour)))
	if _, err := d.Acquire(ctx, backend.Claim{Key: "old", Token: "other", TTL: time.Minute,
		Timeout: 10 * time.Second}); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire of an old hold by the driver that made it: %v", err)
	}
	if _, err := clock.Acquire(ctx, claim("old")); err != nil {
		t.Errorf("acquire of an old hold by a new driver with a clock: %v", err)
	}

	// The object of another program is not replaced, and a large one is not read to its end.
	value := strings.Repeat(" ", 5<<20) + `{"key":"Zm9yZWlnbg==","write":1}`
	foreign := await.Value(s.Put(ctx, "foreign", []byte(value), ""))
	if _, err := d.Acquire(ctx, claim("foreign")); !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("acquire of the object of another program: %v", err)
	}
	if e := await.Value(s.Get(ctx, "foreign")); e.Version != foreign {
		t.Error("the object of another program was replaced")
	}
}

// The DELETE of these servers is of no use. Each fake is in front of a real server.
func TestDelete(t *testing.T) {
	t.Parallel()
	real := startServer(t)
	var mu sync.Mutex // guards deleted
	deleted := map[string]bool{}
	fakes := map[string]fake{
		"obeys": func(http.ResponseWriter, *http.Request) bool { return false },
		"lacks": func(w http.ResponseWriter, r *http.Request) bool {
			lacks := r.Method == http.MethodDelete && r.Header.Get("If-Match") != ""
			if lacks {
				refuse(w, http.StatusNotImplemented, "NotImplemented")
			}
			return lacks
		},
		"ignores": func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodDelete {
				return false
			}
			in := &s3.DeleteObjectInput{Bucket: aws.String("bucket"), Key: objectOf(r)}
			_, err := real.client().DeleteObject(r.Context(), in)
			if err == nil {
				w.WriteHeader(http.StatusNoContent)
			}
			return err == nil
		},
		"answers 412 at a delete marker": func(w http.ResponseWriter, r *http.Request) bool {
			mu.Lock()
			defer mu.Unlock()
			if r.Method == http.MethodDelete {
				deleted[*objectOf(r)] = true
			}
			marked := r.Method == http.MethodPut && deleted[*objectOf(r)]
			if marked {
				refuse(w, http.StatusPreconditionFailed, "PreconditionFailed")
			}
			return marked
		},
	}

	for name, answer := range fakes {
		t.Run(name, func(t *testing.T) {
			var dropped sync.Map
			addr := real.front(t, func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method == http.MethodDelete {
					dropped.Store(*objectOf(r), true)
				}
				return answer(w, r)
			})
			ctx := t.Context()
			await.Must(t, await.Value(open(ctx, addr, "")).(io.Closer).Close())

			front := &server{addr: addr}
			s := await.Value(s3kv.New(front.client(), "bucket", name+"/", false))
			one := await.Value(s.Put(ctx, "key", []byte("1"), ""))
			two := await.Value(s.Put(ctx, "key", []byte("2"), one))
			if err := s.Delete(ctx, "key", one); !errors.Is(err, caslock.ErrConflict) {
				t.Errorf("Delete of an old version: %v", err)
			}
			if e := await.Value(s.Get(ctx, "key")); e.Version != two {
				t.Errorf("after a Delete of an old version: %q, want %q", e.Version, two)
			}

			await.Must(t, s.Delete(ctx, "key", two))
			if e := await.Value(s.Get(ctx, "key")); e.Version != "" {
				t.Errorf("after a Delete: %+v", e)
			}
			if es, _, err := s.Scan(ctx, "", 10); len(es) > 0 || err != nil {
				t.Errorf("Scan after a Delete: %v, %v", es, err)
			}
			if _, plain := dropped.Load(name + "/key.json"); plain && name != "obeys" {
				t.Error("a DELETE without a condition could remove a new hold")
			}

			three := await.Value(s.Put(ctx, "key", []byte("3"), ""))
			if _, err := s.Put(ctx, "key", []byte("4"), ""); !errors.Is(err, caslock.ErrConflict) {
				t.Errorf("Put of a name that exists again: %v", err)
			}
			if e := await.Value(s.Get(ctx, "key")); e.Version != three {
				t.Errorf("after a Put of a deleted name: %q, want %q", e.Version, three)
			}
		})
	}

	// The names of probes leave nothing behind.
	out := await.Value(real.client().ListObjectsV2(t.Context(),
		&s3.ListObjectsV2Input{Bucket: aws.String("bucket")}))
	for _, o := range out.Contents {
		if strings.Contains(*o.Key, "probe") {
			t.Errorf("the probe has left %s", *o.Key)
		}
	}
}

// A store that ignores a condition could grant a key to two holders. Each fake is in front of a
// real server.
func TestServersThatCannotKeepLocks(t *testing.T) {
	t.Parallel()
	real := startServer(t)
	conditional := func(r *http.Request) bool {
		return r.Method == http.MethodPut && r.Header.Get("If-Match")+r.Header.Get("If-None-Match") != ""
	}
	addr := real.front(t, func(w http.ResponseWriter, r *http.Request) bool {
		if !conditional(r) {
			return false
		}
		in := &s3.PutObjectInput{Bucket: aws.String("bucket"), Key: objectOf(r)}
		value, _ := io.ReadAll(r.Body)
		in.Body = strings.NewReader(string(value))
		out, err := real.client().PutObject(r.Context(), in)
		if err == nil {
			w.Header().Set("ETag", *out.ETag)
		}
		return err == nil
	})
	refused(t, at(addr, ""), true, "does not compare versions")

	addr = real.front(t, func(w http.ResponseWriter, r *http.Request) bool {
		if conditional(r) {
			refuse(w, http.StatusNotImplemented, "NotImplemented")
		}
		return conditional(r)
	})
	refused(t, at(addr, ""), true, "lacks a condition")
}

// The bucket has more records than can be read within a Timeout, because each answer comes late.
func TestListOfALateServer(t *testing.T) {
	t.Parallel()
	real, ctx := startServer(t), t.Context()
	s := store(real)
	var wg sync.WaitGroup
	for i := range 300 {
		value := fmt.Appendf(nil, `{"key":"a2V5","write":%d}`, time.Now().UnixMicro())
		wg.Go(func() {
			if _, err := s.Put(ctx, fmt.Sprint("key", i), value, ""); err != nil {
				t.Error(err)
			}
		})
		if i%8 == 7 {
			wg.Wait()
		}
	}
	wg.Wait()

	var late atomic.Bool
	addr := real.front(t, func(http.ResponseWriter, *http.Request) bool {
		if late.Load() {
			time.Sleep(200 * time.Millisecond)
		}
		return false
	})
	c := await.Value(hasp.Open(ctx, at(addr, "timeout=1500ms"), nil))
	defer c.Close()
	await.Value(c.Lock(ctx, "held"))

	late.Store(true)
	defer late.Store(false)
	var keys []string
	for e, err := range c.List(ctx, "") {
		await.Must(t, err)
		keys = append(keys, e.Key)
	}
	if !slices.Equal(keys, []string{"held"}) {
		t.Errorf("list: %q", keys)
	}
}

func ExampleNew() {
	ctx := context.Background()
	var client *s3.Client // of s3.NewFromConfig
	store, err := s3kv.New(client, "bucket", "locks/", false)
	if err != nil {
		panic(err)
	}
	locks, err := caslock.New(ctx, store, nil)
	if err != nil {
		panic(err)
	}
	defer locks.Close()
}
