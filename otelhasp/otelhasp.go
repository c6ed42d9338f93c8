// Package otelhasp records what a hasp.Client does as metrics and traces of [OpenTelemetry].
// [Observe] creates both from the events of the Client:
//
//	c, err := hasp.Open(ctx, url, &hasp.Options{Observe: otelhasp.Observe(nil)})
//
// The names follow db.client.connection.* of the semantic conventions. The instruments are:
//
//   - hasp.client.lock.wait_time, a histogram in seconds: how long each call of Lock, TryLock
//     or Resume took, with hasp.operation.name ("lock", "trylock" or "resume"). If the caller
//     did not get the key, error.type says why.
//   - hasp.client.lock.use_time, a histogram in seconds: how long each hold lasted. If the
//     hold was not unlocked, or the outcome of the Unlock is unknown, error.type says so.
//   - hasp.client.lock.count, an up-down counter: how many holds there are. Its attribute
//     hasp.client.lock.state is "used".
//   - hasp.client.lock.pending_requests, an up-down counter: how many calls of Lock, TryLock
//     or Resume have not returned, with hasp.operation.name.
//   - hasp.client.lock.timeouts, a counter: calls of Lock that ended without the key because of
//     WithMaxWait or the deadline of the context. A Lock with WithMaxWait(0) that finds the key
//     held is counted. A TryLock is not.
//   - hasp.client.lock.losses, a counter: leases that were lost. Their callers may have worked while
//     another caller held the key. hasp.loss.reason is the Reason of a hasp.LostError.
//   - hasp.client.lock.renewal_failures, a counter: renewals and calls of Extend that failed
//     or were not answered. hasp repeats a renewal until the lease ends.
//   - hasp.client.lock.followers and hasp.client.lock.leaders, up-down counters: how many
//     calls of Lead wait to lead, and how many lead.
//
// A lease that was detached counts as unlocked. The lease of Resume counts as a new hold.
//
// A lease from a re-entry shares the hold of another lease, and is counted only in pending_requests
// and losses. Calls of Lead are counted in followers, leaders, losses and renewal_failures. If a
// call of Lead ends before it leads, or the store fails while it waits, wait_time counts that call
// with the hasp.operation.name "lead".
//
// The values of error.type are: held, unavailable, canceled, deadline_exceeded, closed, lost,
// invalid, unsupported and _OTHER. If several values apply, error.type is the first of them in this
// order: unavailable, closed, invalid, unsupported, canceled, held, deadline_exceeded, lost.
//
// Each call of Lock, TryLock, Resume or Lead has a span "hasp wait", unless the call re-entered.
// With [WithHoldSpans], each hold has a span "hasp hold". Both are children of the caller's span,
// which is in the context of that call. The spans that are started with the lease's context are
// also children of the caller's span. Spans and metrics include the key only if [WithKey] is used.
//
// [OpenTelemetry]: https://opentelemetry.io
package otelhasp

import (
	"context"
	"errors"
	"slices"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/hasplock/hasp"
)

// scope is the name of the meter and of the tracer.
const scope = "github.com/hasplock/hasp/otelhasp"

const (
	operationKey = attribute.Key("hasp.operation.name")
	stateKey     = attribute.Key("hasp.client.lock.state")
	keyKey       = attribute.Key("hasp.key")
	triesKey     = attribute.Key("hasp.tries")
	fenceKey     = attribute.Key("hasp.fence")
	errorTypeKey = attribute.Key("error.type")
	lossKey      = attribute.Key("hasp.loss.reason")
)

// Option changes what [Observe] records.
type Option func(*config)

type config struct {
	meters    metric.MeterProvider
	tracers   trace.TracerProvider
	attrs     []attribute.KeyValue // of WithAttributes
	key       func(string) string  // nil if there is no WithKey
	holdSpans bool
}

// WithMeterProvider sets the provider of metrics. The default is the global one. A provider of
// package metric/noop switches metrics off.
func WithMeterProvider(p metric.MeterProvider) Option { return func(c *config) { c.meters = p } }

// WithTracerProvider sets the provider of spans. The default is the global one. A provider of
// package trace/noop switches spans off.
func WithTracerProvider(p trace.TracerProvider) Option { return func(c *config) { c.tracers = p } }

// WithAttributes adds attrs to every metric and span. In a program with several Clients, an
// attribute such as the strategy distinguishes them.
func WithAttributes(attrs ...attribute.KeyValue) Option {
	return func(c *config) { c.attrs = append(c.attrs, attrs...) }
}

// WithKey adds the attribute hasp.key to every metric and span. The value is name(key). That key
// does not include the prefix of the Client. If the value is "", the attribute is left out.
//
// The function name should return few different values, such as "invoices" for the key
// "invoices/2024-06", because the provider keeps time series for each value until the provider
// shuts down. Many goroutines call the function, once for each event.
func WithKey(name func(key string) string) Option { return func(c *config) { c.key = name } }

// WithHoldSpans adds a span for each hold. The span begins when the caller gets the key, and ends
// when the hold has ended. Each failed renewal is an event of the span.
func WithHoldSpans() Option { return func(c *config) { c.holdSpans = true } }

// Observe returns a function for hasp.Options.Observe. The function records metrics and spans. If
// the argument next is not nil, the function then calls next with the same arguments.
//
// Call Observe once for each Client. Errors of the provider go to the error handler of package
// otel.
func Observe(next func(context.Context, hasp.Event), opts ...Option) func(context.Context, hasp.Event) {
	return newObserver(next, opts).observe
}

// observer is the state of one call of Observe.
type observer struct {
	config
	next    func(context.Context, hasp.Event) // may be nil
	metrics metrics
	spans   spans
}

func newObserver(next func(context.Context, hasp.Event), opts []Option) *observer {
	o := &observer{next: next}
	for _, opt := range opts {
		if opt != nil {
			opt(&o.config)
		}
	}

	if o.meters == nil {
		o.meters = otel.GetMeterProvider()
	}
	if o.tracers == nil {
		o.tracers = otel.GetTracerProvider()
	}
	o.metrics.init(&o.config)
	o.spans.config = &o.config
	o.spans.tracer = o.tracers.Tracer(scope)
	return o
}

// observe records the event e, and then calls next, so that next sees metrics that include e.
func (o *observer) observe(ctx context.Context, e hasp.Event) {
	key := ""
	if o.key != nil {
		key = o.key(e.Key)
	}
	o.record(ctx, e, errorType(e.Err), key)
	if o.next == nil {
		return
	}

	// If next panics at the beginning of a call or a lease, the call or the lease ends by the
	// panic, and no event reports that. So record its end here. Otherwise the up-down counters
	// would count it for ever.
	returns := false // stays false if next panics or ends the goroutine
	defer func() {
		end, begins := endOf[e.Kind]
		if begins && !returns {
			e.Kind = end
			o.record(ctx, e, "panic", key)
		}
	}()
	o.next(ctx, e)
	returns = true
}

// record records the event e, whose error.type is kind, and whose hasp.key is key.
func (o *observer) record(ctx context.Context, e hasp.Event, kind, key string) {
	o.metrics.record(ctx, e, kind, key)
	o.spans.record(ctx, e, kind, key)
}

// endOf maps the kind of an event that begins a call or a lease to the kind that reports its end.
var endOf = map[hasp.EventKind]hasp.EventKind{
	hasp.EventRequested: hasp.EventRefused,
	hasp.EventAcquired:  hasp.EventReleased,
}

// attributes returns the attributes of WithAttributes, those in the slice more, and the attribute
// hasp.key unless key is empty.
func (c *config) attributes(key string, more ...attribute.KeyValue) []attribute.KeyValue {
	attrs := append(slices.Clone(c.attrs), more...)
	if key != "" {
		attrs = append(attrs, keyKey.String(key))
	}
	return attrs
}

// errorTypes are the values of error.type. If an error matches several values, the first of these
// values counts.
var errorTypes = []struct {
	err  error
	name string
}{
	{hasp.ErrUnavailable, "unavailable"},
	{hasp.ErrClosed, "closed"},
	{hasp.ErrInvalid, "invalid"},
	{errors.ErrUnsupported, "unsupported"},
	{context.Canceled, "canceled"}, // before held, because the caller gave up and did not time out
	{hasp.ErrHeld, "held"},
	{context.DeadlineExceeded, "deadline_exceeded"},
	{hasp.ErrLost, "lost"},
}

var lossReasons = []string{
	hasp.LostRevoked,
	hasp.LostUnanswered,
	hasp.LostStopped,
	hasp.LostNotRenewed,
	hasp.LostMaxHold,
}

// lossReason returns the Reason of err, or "" if err is not a LostError.
func lossReason(err error) string {
	var lost *hasp.LostError
	if errors.As(err, &lost) {
		return lost.Reason
	}
	return ""
}

// errorType returns the error.type of err, or "" if err is nil.
func errorType(err error) string {
	if err == nil {
		return ""
	}
	for _, t := range errorTypes {
		if errors.Is(err, t.err) {
			return t.name
		}
	}

	return "_OTHER"
}
