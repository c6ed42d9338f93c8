package otelhasp_test

import (
	"context"
	"testing"

	noopmetric "go.opentelemetry.io/otel/metric/noop"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	nooptrace "go.opentelemetry.io/otel/trace/noop"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/otelhasp"
)

// discard drops spans that have ended, so that the benchmark measures their making.
type discard struct{}

func (discard) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (discard) OnEnd(sdktrace.ReadOnlySpan)                     {}
func (discard) Shutdown(context.Context) error                  { return nil }
func (discard) ForceFlush(context.Context) error                { return nil }

// A Lock and Unlock in one process, which costs the least of all, with what Observe adds.
func BenchmarkLockUnlock(b *testing.B) {
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(discard{}))
	unsampled := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(discard{}), sdktrace.WithSampler(sdktrace.NeverSample()))
	noMetrics, noSpans := otelhasp.WithMeterProvider(noopmetric.NewMeterProvider()), otelhasp.WithTracerProvider(nooptrace.NewTracerProvider())
	for _, bc := range []struct {
		name    string
		observe func(context.Context, hasp.Event)
	}{
		{"without", nil},
		{"an Observe that does nothing", func(context.Context, hasp.Event) {}},
		{"neither metrics nor spans", otelhasp.Observe(nil, noMetrics, noSpans)},
		{"metrics", otelhasp.Observe(nil, otelhasp.WithMeterProvider(newMeter()), noSpans)},
		{"metrics with the key", otelhasp.Observe(nil, otelhasp.WithMeterProvider(newMeter()), noSpans, otelhasp.WithKey(func(key string) string { return key }))},
		{"metrics and spans not sampled", otelhasp.Observe(nil, otelhasp.WithMeterProvider(newMeter()), otelhasp.WithTracerProvider(unsampled), otelhasp.WithHoldSpans())},
		{"metrics and spans of waits", otelhasp.Observe(nil, otelhasp.WithMeterProvider(newMeter()), otelhasp.WithTracerProvider(tracers))},
		{"metrics and spans of waits and holds", otelhasp.Observe(nil, otelhasp.WithMeterProvider(newMeter()), otelhasp.WithTracerProvider(tracers), otelhasp.WithHoldSpans())},
	} {
		b.Run(bc.name, func(b *testing.B) {
			c := hasp.New(memlock.New(), &hasp.Options{Observe: bc.observe})
			defer c.Close()
			ctx := b.Context()
			b.ReportAllocs()
			for b.Loop() {
				l, err := c.Lock(ctx, "k")
				if err != nil {
					b.Fatal(err)
				}
				if err := l.Unlock(ctx); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
