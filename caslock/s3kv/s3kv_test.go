package s3kv_test

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/s3kv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// at returns the URL of the bucket of the server at an address.
func at(addr, params string) string {
	return "s3://bucket/locks?endpoint=http://" + addr + "&" + params
}

func TestConformance(t *testing.T) {
	adaptertest.Clocks(t, func(t *testing.T, params string) conformance.Harness {
		s := &server{}
		start := func(_ context.Context, data bool) (string, error) {
			if !data {
				s.clear(t)
			}
			err := s.start()
			return s.addr, err
		}
		h := adaptertest.Harness(start, s.kill, func(addr string) string { return at(addr, params) })
		h.Cannot = map[string]string{
			"keys-long": "versitygw replaces an object by a file with a longer name, for which " +
				"the name is too long",
		}
		return h
	})
}

// store returns a Store in the bucket of the server at an address.
func store(addr string) *s3kv.Store {
	return await.Value(s3kv.New(client(addr), "bucket", "locks/", false))
}

func claim(key string) backend.Claim {
	return backend.Claim{Key: key, Token: "token", TTL: time.Minute, Timeout: 10 * time.Second}
}

func TestObjects(t *testing.T) {
	t.Parallel()
	real, ctx := startServer(t), t.Context()
	s := store(real.addr)
	d := await.Value(adaptertest.Driver(ctx, at(real.addr, "")))
	clock := await.Value(adaptertest.Driver(ctx, at(real.addr, "clock=true")))

	// A hold ages by the clock of the store, if it has one.
	await.Value(d.Acquire(ctx, claim("old")))
	file := filepath.Join(real.dir, "bucket", "locks", "old.json")
	await.Must(t, os.Chtimes(file, time.Time{}, time.Now().Add(-time.Hour)))
	other := claim("old")
	other.Token = "other"
	await.ErrorIs(t, "acquire of an old hold by the driver that made it",
		await.ErrorOf(d.Acquire(ctx, other)), backend.ErrHeld)
	if _, err := clock.Acquire(ctx, claim("old")); err != nil {
		t.Errorf("acquire of an old hold by a new driver with a clock: %v", err)
	}

	// The object of another program is not replaced, and a large one is not read to its end.
	value := strings.Repeat(" ", 5<<20) + `{"key":"Zm9yZWlnbg==","write":1}`
	foreign := await.Value(s.Put(ctx, "foreign", []byte(value), ""))
	await.ErrorIs(t, "acquire of the object of another program",
		await.ErrorOf(d.Acquire(ctx, claim("foreign"))), backend.ErrInvalid)
	if e := await.Value(s.Get(ctx, "foreign")); e.Version != foreign {
		t.Error("the object of another program was replaced")
	}
}

// A DELETE removes the expected version only. If the server lacks such a DELETE, no hold is removed,
// and an opened driver leaves no object of its probe.
func TestDelete(t *testing.T) {
	t.Parallel()
	real, ctx := startServer(t), t.Context()
	lacking := real.front(t, func(w http.ResponseWriter, r *http.Request) bool {
		lacks := r.Method == http.MethodDelete && r.Header.Get("If-Match") != ""
		if lacks {
			refuse(w, http.StatusNotImplemented, "NotImplemented")
		}
		return lacks
	})

	s, lacks := store(real.addr), store(lacking)
	one := await.Value(s.Put(ctx, "key", []byte("1"), ""))
	two := await.Value(s.Put(ctx, "key", []byte("2"), one))
	await.ErrorIs(t, "Delete of an old version", s.Delete(ctx, "key", one), caslock.ErrConflict)
	await.ErrorIs(t, "Delete by a server that lacks it",
		lacks.Delete(ctx, "key", two), backend.ErrInvalid)
	if e := await.Value(s.Get(ctx, "key")); e.Version != two {
		t.Errorf("after two wrong calls of Delete: %q, want %q", e.Version, two)
	}
	await.Must(t, s.Delete(ctx, "key", two))
	if e := await.Value(s.Get(ctx, "key")); e.Version != "" {
		t.Errorf("after a Delete: %+v", e)
	}

	d := await.Value(adaptertest.Driver(ctx, at(lacking, "")))
	await.Must(t, d.(io.Closer).Close())
	in := &s3.ListObjectsV2Input{Bucket: aws.String("bucket")}
	if left := await.Value(client(real.addr).ListObjectsV2(ctx, in)).Contents; len(left) > 0 {
		t.Errorf("the probe has left %d objects", len(left))
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
