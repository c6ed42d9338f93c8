package otelhasp_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	nooptrace "go.opentelemetry.io/otel/trace/noop"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/otelhasp"
)

var must = await.Must

// meter is a MeterProvider whose metrics a test reads.
type meter struct {
	*sdkmetric.MeterProvider
	reader *sdkmetric.ManualReader
}

func newMeter() meter {
	reader := sdkmetric.NewManualReader()
	return meter{sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)), reader}
}

// collect returns the metrics of the only scope.
func (m meter) collect(t testing.TB) []metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	must(t, m.reader.Collect(context.Background(), &all))
	if len(all.ScopeMetrics) != 1 {
		t.Fatalf("%d scopes, want one", len(all.ScopeMetrics))
	}
	return all.ScopeMetrics[0].Metrics
}

// figures returns the sums of counters and the counts of histograms by name and attributes,
// such as "wait_time hasp.operation.name=lock". Those that are 0 are left out. It also
// returns the sums of the histograms by name, in seconds.
func (m meter) figures(t testing.TB) (counts map[string]int64, seconds map[string]float64) {
	t.Helper()
	counts, seconds = map[string]int64{}, map[string]float64{}
	for _, metric := range m.collect(t) {
		name := metric.Name[len("hasp.client.lock."):]
		add := func(attrs attribute.Set, n int64) {
			for _, a := range attrs.ToSlice() {
				name += " " + string(a.Key) + "=" + a.Value.String()
			}
			if n != 0 {
				counts[name] += n
			}
			name = metric.Name[len("hasp.client.lock."):]
		}
		switch data := metric.Data.(type) {
		case metricdata.Sum[int64]:
			for _, p := range data.DataPoints {
				add(p.Attributes, p.Value)
			}
		case metricdata.Histogram[float64]:
			for _, p := range data.DataPoints {
				add(p.Attributes, int64(p.Count))
				seconds[name] += p.Sum
			}
		default:
			t.Errorf("%s is a %T", metric.Name, data)
		}
	}
	return counts, seconds
}

// want checks all figures that are not 0.
func (m meter) want(t *testing.T, want map[string]int64) {
	t.Helper()
	if got, _ := m.figures(t); !maps.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// Names, kinds and units as docs/telemetry.md lists them. The sums of changes are up-down
// counters, and the others only grow. All of the counters exist before the first lock.
func TestInstruments(t *testing.T) {
	m := newMeter()
	observe := otelhasp.Observe(nil, otelhasp.WithMeterProvider(m))
	if got, _ := m.figures(t); len(m.collect(t)) != 7 || len(got) != 0 {
		t.Errorf("before the first lock: %d metrics, of which %v; want 7, all 0", len(m.collect(t)), got)
	}

	c := hasp.New(memlock.New(), &hasp.Options{Observe: observe})
	defer c.Close()
	must(t, hasp.Do(t.Context(), c, "k", func(context.Context, *hasp.Lease) error { return nil }))
	got := map[string]string{}
	for _, metric := range m.collect(t) {
		kind := "histogram"
		if sum, ok := metric.Data.(metricdata.Sum[int64]); ok {
			kind = fmt.Sprintf("sum, monotonic %v", sum.IsMonotonic)
		} else if bounds := metric.Data.(metricdata.Histogram[float64]).DataPoints[0].Bounds; bounds[0] != 0.001 || bounds[len(bounds)-1] != 3600 {
			t.Errorf("%s has the buckets %v, want a millisecond to an hour", metric.Name, bounds)
		}
		got[metric.Name] = kind + ", " + metric.Unit
		if metric.Description == "" {
			t.Errorf("%s has no description", metric.Name)
		}
	}
	want := map[string]string{
		"hasp.client.lock.wait_time":        "histogram, s",
		"hasp.client.lock.use_time":         "histogram, s",
		"hasp.client.lock.count":            "sum, monotonic false, {lock}",
		"hasp.client.lock.pending_requests": "sum, monotonic false, {request}",
		"hasp.client.lock.followers":        "sum, monotonic false, {follower}",
		"hasp.client.lock.leaders":          "sum, monotonic false, {leader}",
		"hasp.client.lock.timeouts":         "sum, monotonic true, {timeout}",
		"hasp.client.lock.losses":           "sum, monotonic true, {loss}",
		"hasp.client.lock.renewal_failures": "sum, monotonic true, {failure}",
	}
	if !maps.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

// flaky is memlock as a store that can fail.
type flaky struct {
	*memlock.Driver
	down   atomic.Bool
	failed atomic.Int64 // renewals
}

var errDown = errors.New("the store is down")

func (f *flaky) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if f.down.Load() {
		return backend.Grant{}, errDown
	}
	return f.Driver.Acquire(ctx, c)
}

func (f *flaky) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if f.down.Load() {
		return backend.Grant{}, errDown
	}
	return f.Driver.Wait(ctx, c)
}

func (f *flaky) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	if !f.down.Load() {
		f.Driver.Renew(ctx, cs, done)
		return
	}
	for i := range cs {
		f.failed.Add(1)
		done(i, backend.Grant{}, errDown)
	}
}

func (f *flaky) Release(ctx context.Context, c backend.Claim) error {
	if f.down.Load() {
		return errDown
	}
	return f.Driver.Release(ctx, c)
}

// Each way in which a wait or a hold can end, with all figures after it. The counts of
// holds and of waits are 0 in each case, because the figures that are 0 are left out.
func TestEachEnd(t *testing.T) {
	const (
		waited   = "wait_time hasp.operation.name=lock"
		tried    = "wait_time hasp.operation.name=trylock"
		refused  = "wait_time error.type=%s hasp.operation.name=lock"
		used     = "use_time"
		lost     = "use_time error.type=lost"
		closed   = "use_time error.type=closed"
		revoked  = "losses hasp.loss.reason=revoked"
		timeouts = "timeouts"
	)
	held := fmt.Sprintf(refused, "held")
	canceled := fmt.Sprintf(refused, "canceled")

	// lock returns a lease of key "k".
	lock := func(t *testing.T, c *hasp.Client, opts ...hasp.Option) *hasp.Lease {
		t.Helper()
		l, err := c.Lock(t.Context(), "k", opts...)
		must(t, err)
		return l
	}
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, c *hasp.Client, f *flaky)
		want map[string]int64
	}{
		{"TryLock", func(t *testing.T, c *hasp.Client, _ *flaky) {
			l, err := c.TryLock(t.Context(), "k")
			must(t, err)
			_, err = c.TryLock(t.Context(), "k")
			wantErr(t, err, hasp.ErrHeld)
			must(t, l.Unlock(t.Context()))
		}, map[string]int64{tried: 1, "wait_time error.type=held hasp.operation.name=trylock": 1, used: 1}},

		{"lost by a break", func(t *testing.T, c *hasp.Client, _ *flaky) {
			l := lock(t, c)
			must(t, c.Break(t.Context(), "k"))
			wantErr(t, l.Unlock(t.Context()), hasp.ErrLost)
		}, map[string]int64{waited: 1, lost: 1, revoked: 1}},

		{"lost at the end of the term, and not unlocked", func(t *testing.T, c *hasp.Client, _ *flaky) {
			l := lock(t, c, hasp.WithoutRenewal())
			<-l.Context().Done()
		}, map[string]int64{waited: 1, lost: 1, "losses hasp.loss.reason=not_renewed": 1}},

		{"lost at the max hold", func(t *testing.T, c *hasp.Client, _ *flaky) {
			l := lock(t, c, hasp.WithMaxHold(time.Minute))
			<-l.Context().Done()
		}, map[string]int64{waited: 1, lost: 1, "losses hasp.loss.reason=max_hold": 1}},

		{"a re-entry is no hold", func(t *testing.T, c *hasp.Client, _ *flaky) {
			outer := lock(t, c)
			inner, err := c.Lock(outer.Context(), "k")
			must(t, err)
			must(t, inner.Unlock(t.Context()))
			must(t, outer.Unlock(t.Context()))
		}, map[string]int64{waited: 1, used: 1}},

		{"a lost re-entry is one more lost lease", func(t *testing.T, c *hasp.Client, _ *flaky) {
			outer := lock(t, c)
			inner, err := c.Lock(outer.Context(), "k")
			must(t, err)
			must(t, c.Break(t.Context(), "k"))
			wantErr(t, outer.Extend(t.Context(), time.Hour), hasp.ErrLost)
			wantErr(t, inner.Unlock(t.Context()), hasp.ErrLost)
		}, map[string]int64{waited: 1, lost: 1, revoked: 2}},

		{"closed", func(t *testing.T, c *hasp.Client, _ *flaky) {
			l := lock(t, c)
			if err := c.Close(); err == nil {
				t.Error("Close does not name the key that is left")
			}
			wantErr(t, l.Err(), hasp.ErrClosed)
			_, err := c.Lock(t.Context(), "k")
			wantErr(t, err, hasp.ErrClosed)
		}, map[string]int64{waited: 1, closed: 1, fmt.Sprintf(refused, "closed"): 1}},

		{"waits that end", func(t *testing.T, c *hasp.Client, _ *flaky) {
			l := lock(t, c)
			_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(time.Second))
			wantErr(t, err, hasp.ErrHeld)
			_, err = c.Lock(t.Context(), "k", hasp.WithMaxWait(0))
			wantErr(t, err, hasp.ErrHeld)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = c.Lock(ctx, "k")
			wantErr(t, err, context.DeadlineExceeded)
			_, err = c.Lock(ctx, "k") // the context has ended before the store could answer
			wantErr(t, err, context.DeadlineExceeded)

			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			_, err = c.Lock(ctx, "k")
			wantErr(t, err, context.Canceled)
			_, err = c.Lock(ctx, "k")
			wantErr(t, err, context.Canceled)
			must(t, l.Unlock(t.Context()))
		}, map[string]int64{waited: 1, used: 1, held: 3, fmt.Sprintf(refused, "deadline_exceeded"): 1, timeouts: 4, canceled: 2}},

		{"LockAll and a min hold", func(t *testing.T, c *hasp.Client, _ *flaky) {
			all, err := hasp.LockAll(t.Context(), c, []string{"a", "b", "k"}, hasp.WithMinHold(time.Minute))
			must(t, err)
			must(t, all.Unlock(t.Context()))
		}, map[string]int64{waited: 3, used: 3}},

		{"an outage of a wait and of an Unlock", func(t *testing.T, c *hasp.Client, f *flaky) {
			l := lock(t, c)
			f.down.Store(true)
			_, err := c.Lock(t.Context(), "other")
			wantErr(t, err, hasp.ErrUnavailable)
			_, err = c.TryLock(t.Context(), "other")
			wantErr(t, err, hasp.ErrUnavailable)
			wantErr(t, l.Unlock(t.Context()), hasp.ErrUnavailable)
			f.down.Store(false)
			must(t, l.Unlock(t.Context())) // learns the outcome, and ends no hold again
		}, map[string]int64{waited: 1, "use_time error.type=unavailable": 1, fmt.Sprintf(refused, "unavailable"): 1,
			"wait_time error.type=unavailable hasp.operation.name=trylock": 1}},

		{"lost because renewals fail", func(t *testing.T, c *hasp.Client, f *flaky) {
			l := lock(t, c)
			f.down.Store(true)
			<-l.Context().Done()
			wantErr(t, l.Unlock(t.Context()), hasp.ErrLost)
		}, map[string]int64{waited: 1, lost: 1, "losses hasp.loss.reason=unanswered": 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, f := newMeter(), &flaky{Driver: memlock.New()}
				c := hasp.New(f, &hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithMeterProvider(m), otelhasp.WithTracerProvider(nooptrace.NewTracerProvider()))})
				tc.run(t, c, f)
				c.Close()
				synctest.Wait()
				if n := f.failed.Load(); n > 0 {
					tc.want["renewal_failures"] = n
				}
				m.want(t, tc.want)
			})
		})
	}
}

func wantErr(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// While callers wait and hold, both gauges say so, and the times are exact.
func TestGaugesAndTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		c := hasp.New(memlock.New(), &hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithMeterProvider(m))})
		defer c.Close()
		l, err := c.Lock(t.Context(), "k")
		must(t, err)
		for range 3 {
			go hasp.Do(t.Context(), c, "k", func(context.Context, *hasp.Lease) error {
				time.Sleep(2 * time.Second)
				return nil
			})
		}
		time.Sleep(10 * time.Second)
		m.want(t, map[string]int64{
			"count hasp.client.lock.state=used":         1,
			"pending_requests hasp.operation.name=lock": 3,
			"wait_time hasp.operation.name=lock":        1,
		})
		must(t, l.Unlock(t.Context()))
		time.Sleep(10 * time.Second)
		m.want(t, map[string]int64{"wait_time hasp.operation.name=lock": 4, "use_time": 4})
		_, seconds := m.figures(t)
		if w, u := seconds["wait_time"], seconds["use_time"]; math.Abs(w-(10+12+14)) > 0.01 || math.Abs(u-(10+3*2)) > 0.01 {
			t.Errorf("waited %v s and used %v s, want 36 and 16", w, u)
		}
	})
}

// A call of Lead is a follower or a leader, and no wait and no hold. But an outage that it
// meets is in wait_time.
func TestLeadersAndFollowers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, f := newMeter(), &flaky{Driver: memlock.New()}
		c := hasp.New(f, &hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithMeterProvider(m))})
		defer c.Close()
		ctx, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		for range 3 {
			go hasp.Lead(ctx, c, "k", func(within context.Context, _ *hasp.Lease) error {
				<-within.Done()
				if ctx.Err() != nil {
					<-over // so that no follower leads at the end
				}
				return nil
			})
		}
		synctest.Wait()
		m.want(t, map[string]int64{"leaders": 1, "followers": 2})

		must(t, c.Break(t.Context(), "k"))
		time.Sleep(time.Minute) // the leader competes again
		m.want(t, map[string]int64{"leaders": 1, "followers": 2, "losses hasp.loss.reason=revoked": 1})

		cancel()
		synctest.Wait()
		const canceled = "wait_time error.type=canceled hasp.operation.name=lead"
		m.want(t, map[string]int64{"leaders": 1, canceled: 2, "losses hasp.loss.reason=revoked": 1})
		close(over)
		synctest.Wait()
		m.want(t, map[string]int64{canceled: 2, "losses hasp.loss.reason=revoked": 1})

		f.down.Store(true)
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		go hasp.Lead(ctx, c, "k", func(context.Context, *hasp.Lease) error { return nil })
		time.Sleep(5 * time.Second)
		if got, _ := m.figures(t); got["wait_time error.type=unavailable hasp.operation.name=lead"] == 0 {
			t.Errorf("got %v, without the outage", got)
		}
	})
}

// The key is an attribute as what WithKey makes of it. In the other tests it is none, because
// it is not asked for.
func TestKeyIfAsked(t *testing.T) {
	class := func(key string) string { return key[:len(key)-2] }
	m := newMeter()
	c := hasp.New(memlock.New(), &hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithKey(class),
		otelhasp.WithAttributes(attribute.String("a", "b")), otelhasp.WithMeterProvider(m))})
	defer c.Close()
	for _, key := range []string{"invoice/1", "invoice/2", "/3"} {
		must(t, hasp.Do(t.Context(), c, key, func(context.Context, *hasp.Lease) error { return nil }))
	}
	m.want(t, map[string]int64{
		"wait_time a=b hasp.key=invoice hasp.operation.name=lock": 2, "use_time a=b hasp.key=invoice": 2,
		"wait_time a=b hasp.operation.name=lock": 1, "use_time a=b": 1, // no class
	})

	// The counters of a key begin at 0 as well.
	points := 0
	for _, metric := range m.collect(t) {
		if metric.Name == "hasp.client.lock.losses" {
			points = len(metric.Data.(metricdata.Sum[int64]).DataPoints)
		}
	}
	if points != 2*5 { // one for each reason, without a class and with one
		t.Errorf("%d series of losses, want 10", points)
	}
}

// Without options the global providers are used. A nil Option has no effect.
func TestGlobalProvider(t *testing.T) {
	before := otel.GetMeterProvider()
	defer otel.SetMeterProvider(before)
	m := newMeter()
	otel.SetMeterProvider(m)
	c := hasp.New(memlock.New(), &hasp.Options{Observe: otelhasp.Observe(nil, nil)})
	defer c.Close()
	must(t, hasp.Do(t.Context(), c, "k", func(context.Context, *hasp.Lease) error { return nil }))
	m.want(t, map[string]int64{"wait_time hasp.operation.name=lock": 1, "use_time": 1})
}

// next gets each event with its context, after it was recorded.
func TestNext(t *testing.T) {
	type ctxKey struct{}
	m := newMeter()
	var kinds []hasp.EventKind
	c := hasp.New(memlock.New(), &hasp.Options{Observe: otelhasp.Observe(func(ctx context.Context, e hasp.Event) {
		kinds = append(kinds, e.Kind)
		if ctx.Value(ctxKey{}) != "v" {
			t.Errorf("%v has another context", e.Kind)
		}
		if got, _ := m.figures(t); e.Kind == hasp.EventAcquired && got["count hasp.client.lock.state=used"] != 1 {
			t.Errorf("next comes before the metrics: %v", got)
		}
	}, otelhasp.WithMeterProvider(m))})
	defer c.Close()
	ctx := context.WithValue(t.Context(), ctxKey{}, "v")
	must(t, hasp.Do(ctx, c, "k", func(context.Context, *hasp.Lease) error { return nil }))
	if want := []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired, hasp.EventReleased}; !slices.Equal(kinds, want) {
		t.Errorf("got %v, want %v", kinds, want)
	}
}
