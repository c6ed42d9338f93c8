package otelhasp

import (
	"context"
	"testing"
	"testing/synctest"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
)

// Nothing is kept of a hold that has ended, nor of one that is not sampled.
func TestNoSpanIsKeptAfterItsEnd(t *testing.T) {
	for _, sampler := range []sdktrace.Sampler{sdktrace.AlwaysSample(), sdktrace.NeverSample()} {
		synctest.Test(t, func(t *testing.T) {
			tracers := sdktrace.NewTracerProvider(sdktrace.WithSampler(sampler))
			o := newObserver(nil, []Option{WithTracerProvider(tracers), WithHoldSpans()})
			kept := func() (n int) {
				o.spans.holds.Range(func(any, any) bool { n++; return true })
				return n
			}
			c := hasp.New(memlock.New(), &hasp.Options{Observe: o.observe})
			want := 0
			if sampler == sdktrace.AlwaysSample() {
				want = 1
			}
			for range 10 {
				err := hasp.Do(t.Context(), c, "k", func(context.Context, *hasp.Lease) error {
					if n := kept(); n != want {
						t.Errorf("%s: %d spans while the key is held, want %d", sampler.Description(), n, want)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			if _, err := c.Lock(t.Context(), "left"); err != nil {
				t.Fatal(err)
			}
			l, err := c.Lock(t.Context(), "lost", hasp.WithMaxHold(1))
			if err != nil {
				t.Fatal(err)
			}
			<-l.Context().Done()
			_ = c.Close()
			if n := kept(); n != 0 {
				t.Errorf("%s: %d spans are kept", sampler.Description(), n)
			}
		})
	}
}
