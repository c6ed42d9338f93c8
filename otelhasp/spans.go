package otelhasp

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/hasplock/hasp"
)

// The type spans creates the trace spans of one call of Observe.
type spans struct {
	config *config
	tracer trace.Tracer
	holds  sync.Map // maps the Event.ID of each present hold to the hold's trace.Span
}

// record begins, changes or ends the span of e, whose error.type is kind. No span is put into a
// context, so spans that are started with the lease's context are children of the caller's span.
func (s *spans) record(ctx context.Context, e hasp.Event, kind, key string) {
	switch e.Kind {
	case hasp.EventAcquired, hasp.EventRefused:
		if e.Reentry {
			return // there was no wait, and the span of the hold has begun already
		}
		s.recordWait(ctx, e, kind, key)
		if s.config.holdSpans && e.Kind == hasp.EventAcquired {
			s.beginHold(ctx, e, key)
		}

	case hasp.EventReleased, hasp.EventDetached, hasp.EventLost:
		// Without WithHoldSpans, and for a re-entry, there is no such span.
		if span, ok := s.holds.LoadAndDelete(e.ID); ok {
			end(span.(trace.Span), kind)
		}

	case hasp.EventRenewFailed:
		if span, ok := s.holds.Load(e.ID); ok {
			span.(trace.Span).AddEvent("renewal failed",
				trace.WithAttributes(errorTypeKey.String(kind)))
		}
	}
}

// recordWait begins and ends the span of a wait, when the wait has ended. The event says how long
// the wait took.
func (s *spans) recordWait(ctx context.Context, e hasp.Event, kind, key string) {
	now := time.Now()
	attrs := s.config.attributes(key, operationKey.String(e.Op), triesKey.Int(e.Tries))
	_, span := s.tracer.Start(ctx, "hasp wait",
		trace.WithTimestamp(now.Add(-e.Wait)), trace.WithAttributes(attrs...))
	end(span, kind, trace.WithTimestamp(now))
}

// beginHold begins the span of a hold, and keeps it until an event with the same ID ends the hold.
func (s *spans) beginHold(ctx context.Context, e hasp.Event, key string) {
	attrs := []attribute.KeyValue{operationKey.String(e.Op)}
	if e.Fence != 0 {
		attrs = append(attrs, fenceKey.Int64(int64(e.Fence)))
	}

	attrs = s.config.attributes(key, attrs...)
	_, span := s.tracer.Start(ctx, "hasp hold", trace.WithAttributes(attrs...))
	if span.IsRecording() { // otherwise the provider discards the span, so its end does not matter
		s.holds.Store(e.ID, span)
	}
}

// The function end ends a span. It omits the error's text, because that text contains the key.
func end(span trace.Span, kind string, opts ...trace.SpanEndOption) {
	if kind != "" {
		span.SetAttributes(errorTypeKey.String(kind))
	}
	switch kind {
	case "", "held", "canceled", "closed": // these outcomes are usual
	default:
		span.SetStatus(codes.Error, kind)
	}

	span.End(opts...)
}
