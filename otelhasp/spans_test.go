package otelhasp_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/otelhasp"
)

// newTracer returns a TracerProvider, and the exporter that gets its spans when they end.
func newTracer() (*sdktrace.TracerProvider, *tracetest.InMemoryExporter) {
	spans := tracetest.NewInMemoryExporter()
	return sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans)), spans
}

// text returns a span as one line: its name, how long it took, its attributes, its status and its
// events.
func text(s tracetest.SpanStub) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %v", s.Name, s.EndTime.Sub(s.StartTime).Round(time.Millisecond))
	for _, a := range s.Attributes {
		fmt.Fprintf(&b, " %s=%s", a.Key, a.Value.String())
	}
	if s.Status.Code != codes.Unset {
		fmt.Fprintf(&b, ", %s", s.Status.Code)
	}
	if len(s.Events) > 0 {
		fmt.Fprintf(&b, ", %s %s", s.Events[0].Name, s.Events[0].Attributes[0].Value.String())
	}
	return b.String()
}

// The spans of the wait and of the hold are children of the span in the context of Lock. The
// context of Unlock does not matter.
func TestSpans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tracer, spans := newTracer()
		c := await.Value(memlock.New(&hasp.Options{Observe: otelhasp.Observe(nil, otelhasp.WithTracerProvider(tracer),
			otelhasp.WithMeterProvider(newMeter()), otelhasp.WithHoldSpans())}))
		defer c.Close()

		first, parent := tracer.Tracer("test").Start(t.Context(), "parent")
		l := await.Value(c.Lock(first, "k"))
		second, other := tracer.Tracer("test").Start(t.Context(), "other")
		time.AfterFunc(5*time.Second, func() { l.Unlock(second) })
		next := await.Value(c.Lock(second, "k"))
		time.Sleep(time.Second)
		must(t, next.Unlock(context.Background()))

		var got []string
		for _, s := range spans.GetSpans() {
			of := map[trace.SpanID]string{parent.SpanContext().SpanID(): "parent", other.SpanContext().SpanID(): "other"}[s.Parent.SpanID()]
			if s.SpanKind != trace.SpanKindInternal || s.InstrumentationScope.Name != "github.com/hasplock/hasp/otelhasp" {
				t.Errorf("%+v", s)
			}
			got = append(got, of+": "+text(s))
		}
		want := []string{
			"other: hasp hold 1s hasp.operation.name=lock",
			"other: hasp wait 5s hasp.operation.name=lock hasp.tries=1",
			"parent: hasp hold 5s hasp.operation.name=lock",
			"parent: hasp wait 0s hasp.operation.name=lock hasp.tries=1",
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}
