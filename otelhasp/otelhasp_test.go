package otelhasp_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/otelhasp"
)

var must = await.Must

// meter is a MeterProvider. Tests read its metrics.
type meter struct {
	*sdkmetric.MeterProvider
	reader *sdkmetric.ManualReader
}

func newMeter() meter {
	reader := sdkmetric.NewManualReader()
	return meter{sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)), reader}
}

func (m meter) collect(t testing.TB) []metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	must(t, m.reader.Collect(context.Background(), &all))
	if len(all.ScopeMetrics) != 1 {
		t.Fatalf("%d scopes, want one", len(all.ScopeMetrics))
	}
	return all.ScopeMetrics[0].Metrics
}

// figures returns the sums of counters and the counts of histograms, by name and attributes, such
// as "wait_time hasp.operation.name=lock". It leaves out zeros. It also returns the sums of the
// histograms in seconds, by name.
func (m meter) figures(t testing.TB) (counts map[string]int64, seconds map[string]float64) {
	t.Helper()
	counts, seconds = map[string]int64{}, map[string]float64{}
	for _, metric := range m.collect(t) {
		name := metric.Name[len("hasp.client.lock."):]
		add := func(attrs attribute.Set, n int64) {
			series := name
			for _, a := range attrs.ToSlice() {
				series += " " + string(a.Key) + "=" + a.Value.String()
			}
			if n != 0 {
				counts[series] += n
			}
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

func (m meter) want(t *testing.T, want map[string]int64) {
	t.Helper()
	if got, _ := m.figures(t); !maps.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// The names, kinds and units are as in the package comment, and all counters exist before the first
// lock. The metrics marked * are up-down counters.
func TestInstruments(t *testing.T) {
	m := newMeter()
	observe := otelhasp.Observe(nil, otelhasp.WithMeterProvider(m))
	if got, _ := m.figures(t); len(m.collect(t)) != 7 || len(got) != 0 {
		t.Errorf("before the first lock: %d metrics, of which %v; want 7, all 0", len(m.collect(t)), got)
	}

	c := await.Value(memlock.New(&hasp.Options{Observe: observe}))
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

// For each way in which a call and its lease can end, check all figures that are not 0, and the
// spans.
func TestEachEnd(t *testing.T) {
	type events = []hasp.Event
	happens := func(kind hasp.EventKind, err error) hasp.Event {
		return hasp.Event{Kind: kind, Err: &hasp.Error{Key: "secret", Err: err}}
	}
	refused := func(err error) hasp.Event { return happens(hasp.EventRefused, err) }
	lost := func(kind hasp.EventKind, reason string) hasp.Event {
		return happens(kind, &hasp.LostError{Reason: reason})
	}
	acquired, released, detached := hasp.Event{Kind: hasp.EventAcquired}, hasp.Event{Kind: hasp.EventReleased}, hasp.Event{Kind: hasp.EventDetached}
	reentry := func(e hasp.Event) hasp.Event { e.Reentry = true; return e }
	fenced := func(e hasp.Event) hasp.Event { e.Fence = 7; return e }
	short := strings.NewReplacer("hasp.client.lock.state", "state", "hasp.operation.name", "op", "hasp.loss.reason", "reason",
		"error.type", "type", "hasp.fence", "fence", "hasp ", "", " hasp.tries=0", "", " 0s", "", ", Error", " Error")

	for _, c := range []struct {
		name    string
		op      string
		events  events // after the request
		figures string
		spans   string
	}{
		{"waits", "lock", nil, "pending_requests op=lock 1", ""},
		{"holds", "lock", events{acquired}, "count state=used 1; wait_time op=lock 1", "wait op=lock"},
		{"unlocked", "trylock", events{acquired, released},
			"use_time 1; wait_time op=trylock 1", "wait op=trylock; hold op=trylock"},
		{"detached", "resume", events{acquired, detached},
			"use_time 1; wait_time op=resume 1", "wait op=resume; hold op=resume"},
		{"detached by a leader", "lead", events{acquired, detached}, "", "wait op=lead; hold op=lead"},
		{"fenced", "lock", events{fenced(acquired), released},
			"use_time 1; wait_time op=lock 1", "wait op=lock; hold op=lock fence=7"},

		{"held", "lock", events{refused(hasp.ErrHeld)},
			"timeouts 1; wait_time type=held op=lock 1", "wait op=lock type=held"},
		{"a TryLock does not time out", "trylock", events{refused(hasp.ErrHeld)},
			"wait_time type=held op=trylock 1", "wait op=trylock type=held"},
		{"a deadline", "lock", events{refused(context.DeadlineExceeded)},
			"timeouts 1; wait_time type=deadline_exceeded op=lock 1", "wait op=lock type=deadline_exceeded Error"},
		{"cancelled", "lock", events{refused(context.Canceled)},
			"wait_time type=canceled op=lock 1", "wait op=lock type=canceled"},
		{"an outage", "lock", events{refused(hasp.ErrUnavailable)},
			"wait_time type=unavailable op=lock 1", "wait op=lock type=unavailable Error"},

		{"lost", "lock", events{acquired, lost(hasp.EventLost, hasp.LostMaxHold)},
			"losses reason=max_hold 1; use_time type=lost 1; wait_time op=lock 1", "wait op=lock; hold op=lock type=lost Error"},
		{"lost, as the Unlock says", "lock", events{acquired, lost(hasp.EventReleased, hasp.LostRevoked)},
			"losses reason=revoked 1; use_time type=lost 1; wait_time op=lock 1", "wait op=lock; hold op=lock type=lost Error"},
		{"lost after a renewal failed", "lock",
			events{acquired, happens(hasp.EventRenewFailed, hasp.ErrUnavailable), lost(hasp.EventLost, hasp.LostUnanswered)},
			"losses reason=unanswered 1; renewal_failures 1; use_time type=lost 1; wait_time op=lock 1",
			"wait op=lock; hold op=lock type=lost Error, renewal failed unavailable"},
		{"closed", "lock", events{acquired, happens(hasp.EventLost, hasp.ErrClosed)},
			"use_time type=closed 1; wait_time op=lock 1", "wait op=lock; hold op=lock type=closed"},
		{"an Unlock of unknown outcome", "lock", events{acquired, happens(hasp.EventReleased, hasp.ErrUnavailable)},
			"use_time type=unavailable 1; wait_time op=lock 1", "wait op=lock; hold op=lock type=unavailable Error"},

		{"a re-entry waits for nothing and is no hold", "lock", events{reentry(acquired), reentry(released)}, "", ""},
		{"a lost re-entry is a lost lease", "lock", events{reentry(acquired), reentry(lost(hasp.EventReleased, hasp.LostRevoked))},
			"losses reason=revoked 1", ""},

		{"follows", "lead", nil, "followers 1", ""},
		{"leads", "lead", events{acquired}, "leaders 1", "wait op=lead"},
		{"leads no more", "lead", events{acquired, lost(hasp.EventLost, hasp.LostStopped)},
			"losses reason=stopped 1", "wait op=lead; hold op=lead type=lost Error"},
		{"an outage that Lead meets", "lead", events{refused(hasp.ErrUnavailable)},
			"wait_time type=unavailable op=lead 1", "wait op=lead type=unavailable Error"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMeter()
				tracer, spans := newTracer()
				observe := otelhasp.Observe(nil, otelhasp.WithMeterProvider(m), otelhasp.WithTracerProvider(tracer), otelhasp.WithHoldSpans())
				for _, e := range append(events{{Kind: hasp.EventRequested}}, c.events...) {
					e.ID, e.Op, e.Key = 1, c.op, "secret"
					observe(t.Context(), e)
				}

				var figures, ended []string
				counts, _ := m.figures(t)
				for name, n := range counts {
					figures = append(figures, fmt.Sprint(name, " ", n))
				}
				slices.Sort(figures)
				for _, s := range spans.GetSpans() {
					ended = append(ended, text(s))
					if strings.Contains(s.Status.Description, "secret") {
						t.Errorf("the status has the text of the error, and with it the key: %q", s.Status.Description)
					}
				}
				if got := short.Replace(strings.Join(figures, "; ")); got != c.figures {
					t.Errorf("figures:\ngot  %s\nwant %s", got, c.figures)
				}
				if got := short.Replace(strings.Join(ended, "; ")); got != c.spans {
					t.Errorf("spans:\ngot  %s\nwant %s", got, c.spans)
				}
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

// The up-down counters show callers while they wait and hold, and the times are exact. The errors
// are of real waits.
func TestGaugesAndTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		c := await.Value(memlock.New(&hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithMeterProvider(m))}))
		defer c.Close()
		l := await.Value(c.Lock(t.Context(), "k"))
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
		_, err := c.Lock(t.Context(), "k", hasp.WithMaxWait(0))
		wantErr(t, err, hasp.ErrHeld)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = c.Lock(ctx, "k")
		wantErr(t, err, context.Canceled)
		must(t, l.Unlock(t.Context()))
		time.Sleep(10 * time.Second)
		m.want(t, map[string]int64{"wait_time hasp.operation.name=lock": 4, "use_time": 4, "timeouts": 1,
			"wait_time error.type=held hasp.operation.name=lock": 1, "wait_time error.type=canceled hasp.operation.name=lock": 1})
		_, seconds := m.figures(t)
		if w, u := seconds["wait_time"], seconds["use_time"]; math.Abs(w-(10+12+14)) > 0.01 || math.Abs(u-(10+3*2)) > 0.01 {
			t.Errorf("waited %v s and used %v s, want 36 and 16", w, u)
		}
	})
}

// The attribute hasp.key is what WithKey returns. The other tests have no WithKey, and so no such
// attribute.
func TestKeyIfAsked(t *testing.T) {
	class := func(key string) string { return key[:len(key)-2] }
	m := newMeter()
	tracer, spans := newTracer()
	c := await.Value(memlock.New(&hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithKey(class),
		otelhasp.WithAttributes(attribute.String("a", "b")), otelhasp.WithMeterProvider(m), otelhasp.WithTracerProvider(tracer))}))
	defer c.Close()
	for _, key := range []string{"invoice/1", "invoice/2", "/3"} {
		must(t, hasp.Do(t.Context(), c, key, func(context.Context, *hasp.Lease) error { return nil }))
	}
	m.want(t, map[string]int64{
		"wait_time a=b hasp.key=invoice hasp.operation.name=lock": 2, "use_time a=b hasp.key=invoice": 2,
		"wait_time a=b hasp.operation.name=lock": 1, "use_time a=b": 1, // the key without a class
	})

	if n := len(spans.GetSpans()); n != 3 { // holds have no spans without WithHoldSpans
		t.Errorf("%d spans of 3 waits", n)
	}
	if span := text(spans.GetSpans()[0]); !strings.HasSuffix(span, " a=b hasp.operation.name=lock hasp.tries=1 hasp.key=invoice") {
		t.Errorf("got the span %s", span)
	}

	// The counters of a key begin at 0 as well.
	points := 0
	for _, metric := range m.collect(t) {
		if metric.Name == "hasp.client.lock.losses" {
			points = len(metric.Data.(metricdata.Sum[int64]).DataPoints)
		}
	}
	if points != 2*5 { // one for each reason, once without a class and once with
		t.Errorf("%d series of losses, want 10", points)
	}
}

// After a panic of next, a call has ended, although no event says so.
func TestNextThatPanics(t *testing.T) {
	for _, kind := range []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired} {
		m := newMeter()
		c := await.Value(memlock.New(&hasp.Options{Observe: otelhasp.Observe(func(_ context.Context, e hasp.Event) {
			if e.Kind == kind {
				panic("in next")
			}
		}, otelhasp.WithMeterProvider(m))}))
		func() {
			defer func() { _ = recover() }()
			_, _ = c.Lock(t.Context(), "k")
			t.Error("Lock has returned")
		}()
		sums, _ := m.figures(t)
		for name, n := range sums {
			if n != 0 && (strings.HasPrefix(name, "count") || strings.HasPrefix(name, "pending")) {
				t.Errorf("%v: %s is %d", kind, name, n)
			}
		}
		must(t, c.Close())
	}
}

// Without options Observe uses the global providers. A nil Option has no effect. Observe calls next
// with each event and its context, after it has recorded the event.
func TestGlobalProviderAndNext(t *testing.T) {
	type ctxKey struct{}
	before := otel.GetMeterProvider()
	defer otel.SetMeterProvider(before)
	m := newMeter()
	otel.SetMeterProvider(m)
	var kinds []hasp.EventKind
	c := await.Value(memlock.New(&hasp.Options{Observe: otelhasp.Observe(func(ctx context.Context, e hasp.Event) {
		kinds = append(kinds, e.Kind)
		if ctx.Value(ctxKey{}) != "v" {
			t.Errorf("%v has another context", e.Kind)
		}
		if got, _ := m.figures(t); e.Kind == hasp.EventAcquired && got["count hasp.client.lock.state=used"] != 1 {
			t.Errorf("next comes before the metrics: %v", got)
		}
	}, nil)}))
	defer c.Close()
	ctx := context.WithValue(t.Context(), ctxKey{}, "v")
	must(t, hasp.Do(ctx, c, "k", func(context.Context, *hasp.Lease) error { return nil }))
	m.want(t, map[string]int64{"wait_time hasp.operation.name=lock": 1, "use_time": 1})
	if want := []hasp.EventKind{hasp.EventRequested, hasp.EventAcquired, hasp.EventReleased}; !slices.Equal(kinds, want) {
		t.Errorf("got %v, want %v", kinds, want)
	}
}
