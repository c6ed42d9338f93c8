package otelhasp

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

func TestNoSpanIsKeptAfterItsEnd(t *testing.T) {
	for _, sampler := range []sdktrace.Sampler{sdktrace.AlwaysSample(), sdktrace.NeverSample()} {
		synctest.Test(t, func(t *testing.T) {
			tracers := sdktrace.NewTracerProvider(sdktrace.WithSampler(sampler))
			o := newObserver(nil, []Option{WithTracerProvider(tracers), WithHoldSpans()})
			kept := func() (n int) {
				o.spans.holds.Range(func(any, any) bool { n++; return true })
				return n
			}
			c := await.Value(memlock.New(&hasp.Options{Observe: o.observe}))
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
				await.Must(t, err)
			}
			await.Value(c.Lock(t.Context(), "left"))
			l := await.Value(c.Lock(t.Context(), "lost", hasp.WithMaxHold(1)))
			<-l.Context().Done()
			_ = c.Close()
			if n := kept(); n != 0 {
				t.Errorf("%s: %d spans are kept", sampler.Description(), n)
			}
		})
	}
}

func TestErrorTypes(t *testing.T) {
	for err, want := range map[error]string{
		nil:                      "",
		errors.New("another"):    "_OTHER",
		errors.ErrUnsupported:    "unsupported",
		&hasp.LostError{}:        "lost",
		context.DeadlineExceeded: "deadline_exceeded",
		errors.Join(hasp.ErrHeld, context.Canceled):         "canceled",
		errors.Join(context.DeadlineExceeded, hasp.ErrHeld): "held",
		errors.Join(context.Canceled, hasp.ErrUnavailable):  "unavailable",
	} {
		if got := errorType(err); got != want {
			t.Errorf("%v: got %q, want %q", err, got, want)
		}
	}
}

// An error of the provider goes to the error handler of package otel, and the instrument is usable.
func TestErrorOfTheProvider(t *testing.T) {
	var got error
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { got = err }))
	defer otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { fmt.Println(err) }))
	if want := errors.New("no more histograms"); instrument("i", want) != "i" || got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}
