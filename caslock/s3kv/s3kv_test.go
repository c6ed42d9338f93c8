package s3kv_test

import (
	"cmp"
	"context"
	"crypto/md5"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/s3kv"
	"github.com/hasplock/hasp/conformance"
)

// fakeS3 is a fake of an S3 server with one bucket, in memory. Its ETags are hashes of the values. A
// conditional PUT gets 409 if the object has changed during its upload. Otherwise it gets 412 or 404
// if its condition is not met. The data survives stop.
type fakeS3 struct {
	addr   string // set by the first start
	broken string // "ignores" or "lacks" and a method: it ignores the conditions, or answers 501

	mu      sync.Mutex // guards the fields below
	http    *http.Server
	objects map[string]object
	answers map[string]int // by method and code
}

type object struct{ value, etag, modified string }

func (f *fakeS3) start(data bool) error {
	l, err := net.Listen("tcp", cmp.Or(f.addr, "127.0.0.1:0"))
	if err != nil {
		return err
	}
	if !data || f.objects == nil {
		f.objects, f.answers = map[string]object{}, map[string]int{}
	}
	f.addr, f.http = l.Addr().String(), &http.Server{Handler: f}
	go f.http.Serve(l)
	return nil
}

func (f *fakeS3) stop() error { return f.http.Close() }

// ServeHTTP serves GetObject, PutObject, DeleteObject and ListObjectsV2.
func (f *fakeS3) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	bucket, name, _ := strings.Cut(r.URL.Path[1:], "/")
	match, create := r.Header.Get("If-Match"), r.Header.Get("If-None-Match") == "*"
	conditional := (match != "" || create) && f.broken != "ignores "+r.Method

	f.mu.Lock()
	before := f.objects[name].etag
	f.mu.Unlock()
	value, err := io.ReadAll(r.Body)
	if r.Method == http.MethodPut {
		time.Sleep(200 * time.Microsecond) // the upload
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	old, exists := f.objects[name]

	refuse := func(status int, code string) {
		f.answers[r.Method+" "+code]++
		w.WriteHeader(status)
		fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", code)
	}
	switch {
	case err != nil: // the upload was cut off
	case bucket != "bucket":
		refuse(http.StatusNotFound, "NoSuchBucket")
	case name == "":
		f.list(w, r)
	case conditional && f.broken == "lacks "+r.Method:
		refuse(http.StatusNotImplemented, "NotImplemented")
	case conditional && before != old.etag:
		refuse(http.StatusConflict, "ConditionalRequestConflict")
	case !exists && (r.Method == http.MethodGet || conditional && !create):
		refuse(http.StatusNotFound, "NoSuchKey")
	case conditional && match != old.etag: // no object has the ETag ""
		refuse(http.StatusPreconditionFailed, "PreconditionFailed")
	case r.Method == http.MethodGet:
		w.Header().Set("ETag", old.etag)
		w.Header().Set("Last-Modified", old.modified)
		io.WriteString(w, old.value)
	case r.Method == http.MethodDelete:
		delete(f.objects, name)
		w.WriteHeader(http.StatusNoContent)
	default:
		f.objects[name] = object{string(value), fmt.Sprintf(`"%x"`, md5.Sum(value)), time.Now().UTC().Format(http.TimeFormat)}
		w.Header().Set("ETag", f.objects[name].etag)
	}
}

// list answers with a page of the names that begin with the prefix, in order.
func (f *fakeS3) list(w io.Writer, r *http.Request) {
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(f.objects)), func(name string) bool {
		return name <= r.FormValue("start-after") || !strings.HasPrefix(name, r.FormValue("prefix"))
	})
	most, _ := strconv.Atoi(r.FormValue("max-keys"))
	fmt.Fprintf(w, "<ListBucketResult><IsTruncated>%t</IsTruncated>", len(names) > most)
	for _, name := range names[:min(len(names), most)] {
		fmt.Fprintf(w, "<Contents><Key>%s</Key></Contents>", name)
	}
	io.WriteString(w, "</ListBucketResult>")
}

// owned is a store whose idle connections are closed with the driver.
type owned struct {
	*s3kv.Store
	transport *http.Transport
}

func (o owned) Close() error { o.transport.CloseIdleConnections(); return nil }

// open opens a driver, with a client that would send calls again.
func open(ctx context.Context, addr, bucket string, clock bool) (owned, backend.Driver, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: 32}
	s, err := s3kv.New(s3.New(s3.Options{Region: "here", BaseEndpoint: aws.String("http://" + addr), UsePathStyle: true,
		Credentials: aws.AnonymousCredentials{}, HTTPClient: &http.Client{Transport: transport}}), bucket, "locks/", clock)
	if err != nil {
		return owned{}, nil, err
	}
	d, err := caslock.NewDriver(ctx, owned{s, transport})
	return owned{s, transport}, d, err
}

// onTerms has the clauses that a clock of the store may change.
var onTerms = regexp.MustCompile("^(takes|acquire|expiry|deadline|process|wait-d|keep|fence-g|list-held|history)")

// The server is a fake.
func TestConformance(t *testing.T) {
	for _, clock := range []bool{false, true} {
		t.Run("clock="+strconv.FormatBool(clock), func(t *testing.T) {
			t.Parallel()
			f := &fakeS3{}
			conformance.Run(t, conformance.Harness{
				Store: func(context.Context) (string, func(), error) {
					err := f.start(true)
					return f.addr, func() { f.stop() }, err
				},
				Open: func(ctx context.Context, addr string) (backend.Driver, error) {
					_, d, err := open(ctx, addr, "bucket", clock)
					return d, err
				},
				Only:  func(clause string) bool { return !clock || onTerms.MatchString(clause) },
				Link:  func(_ context.Context, addr string) (*conformance.Link, error) { return conformance.TCP(addr) },
				Stop:  func(context.Context, string) error { return f.stop() },
				Start: func(_ context.Context, _ string, data bool) error { return f.start(data) },
				Kick:  func(context.Context, string) error { return errors.Join(f.stop(), f.start(true)) },
			})
		})
	}
}

// A store that ignores a condition could grant a key to two holders.
func TestServersThatCannotKeepLocks(t *testing.T) {
	for broken, want := range map[string]string{
		"ignores PUT": "does not compare versions", "lacks PUT": "lacks a condition",
		"ignores DELETE": "does not compare versions", "lacks DELETE": "lacks a condition",
	} {
		f := &fakeS3{broken: broken}
		f.start(true)
		defer f.stop()
		_, _, err := open(t.Context(), f.addr, "bucket", false)
		if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("a server that %s: %v", broken, err)
		}
	}
}

func TestObjects(t *testing.T) {
	f, ctx := &fakeS3{}, t.Context()
	f.start(true)
	defer f.stop()
	s, d, err1 := open(ctx, f.addr, "bucket", false)
	_, clock, err2 := open(ctx, f.addr, "bucket", true)
	_, _, err3 := open(ctx, f.addr, "other", false)
	_, _, err4 := open(ctx, f.addr, "", false)
	if err1 != nil || err2 != nil || err3 == nil || !strings.Contains(err3.Error(), "NoSuchBucket") || !errors.Is(err4, backend.ErrInvalid) {
		t.Fatal(err1, err2, err3, err4)
	}
	claim := func(key string) backend.Claim {
		return backend.Claim{Key: key, Token: "token", TTL: time.Minute, Timeout: 10 * time.Second}
	}

	// Equal values have equal ETags, but caslock writes no value twice, even for the same claim.
	one, _ := s.Put(ctx, "equal", []byte("equal"), "")
	if two, err := s.Put(ctx, "equal", []byte("equal"), one); one != two || err != nil {
		t.Errorf("the fake has other ETags than S3: %s, %s, %v", one, two, err)
	}
	seen := map[string]bool{}
	for range 10 {
		_, err := d.Acquire(ctx, claim("key"))
		held, _ := s.Get(ctx, "key")
		err = errors.Join(err, d.Release(ctx, claim("key")))
		free, _ := s.Get(ctx, "key")
		if err != nil || seen[held.Version] || seen[free.Version] || held.Version == free.Version {
			t.Errorf("%v, or an ETag comes twice: %s, %s", err, held.Version, free.Version)
		}
		seen[held.Version], seen[free.Version] = true, true
	}

	// Of writers that meet, one wins. The others get 409, 412 or 404.
	for range 50 {
		e, _ := s.Get(ctx, "contended")
		errs := make([]error, 8)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { _, errs[i] = s.Put(ctx, "contended", fmt.Append(nil, e.Version, i), e.Version) })
		}
		wg.Wait()
		if won := slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, caslock.ErrConflict) }); len(won) != 1 || won[0] != nil {
			t.Fatal(won)
		}
	}
	err := s.Delete(ctx, "absent", one)
	if !errors.Is(err, caslock.ErrConflict) || f.answers["DELETE NoSuchKey"]*f.answers["PUT ConditionalRequestConflict"]*f.answers["PUT PreconditionFailed"] == 0 {
		t.Errorf("delete of an absent object: %v; the fake has answered %v", err, f.answers)
	}

	// A hold ages by the clock of the store, if it has one.
	_, err1 = d.Acquire(ctx, claim("old"))
	o := f.objects["locks/old.json"]
	f.objects["locks/old.json"] = object{o.value, o.etag, time.Now().UTC().Add(-time.Hour).Format(http.TimeFormat)}
	if _, err2 = clock.Acquire(ctx, claim("old")); err1 != nil || err2 != nil {
		t.Errorf("acquire, and of an old hold by a new driver: %v, %v", err1, err2)
	}

	// The object of another program is not replaced, and a large one is not read to its end.
	o = object{value: strings.Repeat(" ", 5<<20) + `{"key":"Zm9yZWlnbg==","write":1}`, etag: `"foreign"`, modified: o.modified}
	f.objects["locks/foreign.json"] = o
	if _, err := d.Acquire(ctx, claim("foreign")); !errors.Is(err, backend.ErrInvalid) || f.objects["locks/foreign.json"] != o {
		t.Errorf("acquire of the object of another program: %v", err)
	}
}
