package otelhasp

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/hasplock/hasp"
)

// bounds are the buckets of both histograms, in seconds. The default ones of OpenTelemetry
// are made for milliseconds.
var bounds = []float64{0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 3600}

// metrics are the instruments of one Observe.
type metrics struct {
	config *config
	known  map[labels]measured // without a key; not changed after init

	waitTime, useTime                 metric.Float64Histogram
	count, pending                    metric.Int64UpDownCounter
	timeouts, losses, renewalFailures metric.Int64Counter
}

// labels are the attributes of one measurement that differ within an instrument. An empty
// string is no attribute.
type labels struct{ state, op, errorType string }

// measured is a set of attributes in the form that instruments take.
type measured struct {
	add    []metric.AddOption
	record []metric.RecordOption
}

// init makes the instruments.
func (m *metrics) init(c *config) {
	m.config = c
	meter := c.meters.Meter(scope)
	m.waitTime = instrument(meter.Float64Histogram("hasp.client.lock.wait_time", metric.WithUnit("s"),
		metric.WithDescription("The time it took to get a lock, or not to get it."),
		metric.WithExplicitBucketBoundaries(bounds...)))
	m.useTime = instrument(meter.Float64Histogram("hasp.client.lock.use_time", metric.WithUnit("s"),
		metric.WithDescription("The time between getting a lock and the end of its hold."),
		metric.WithExplicitBucketBoundaries(bounds...)))
	m.count = instrument(meter.Int64UpDownCounter("hasp.client.lock.count", metric.WithUnit("{lock}"),
		metric.WithDescription("The number of locks that are held.")))
	m.pending = instrument(meter.Int64UpDownCounter("hasp.client.lock.pending_requests", metric.WithUnit("{request}"),
		metric.WithDescription("The number of callers that wait for a lock.")))
	m.timeouts = instrument(meter.Int64Counter("hasp.client.lock.timeouts", metric.WithUnit("{timeout}"),
		metric.WithDescription("The number of waits for a lock that timed out.")))
	m.losses = instrument(meter.Int64Counter("hasp.client.lock.losses", metric.WithUnit("{loss}"),
		metric.WithDescription("The number of leases that were lost before they were unlocked.")))
	m.renewalFailures = instrument(meter.Int64Counter("hasp.client.lock.renewal_failures", metric.WithUnit("{failure}"),
		metric.WithDescription("The number of renewals that failed or were not answered.")))

	// Attribute sets are costly to make. There are few of them as long as they have no key.
	m.known = map[labels]measured{}
	kinds := []string{"", otherError}
	for _, t := range errorTypes {
		kinds = append(kinds, t.name)
	}
	for _, kind := range kinds {
		for _, op := range []string{"", "lock", "trylock"} {
			l := labels{op: op, errorType: kind}
			m.known[l] = m.measure(l, "")
		}
	}
	used := labels{state: "used"}
	m.known[used] = m.measure(used, "")

	// An increase from nothing to 1 is not an increase for Prometheus, so the counters
	// begin at 0.
	ctx := context.Background()
	m.beginCounters(ctx, m.known[labels{}])
	m.count.Add(ctx, 0, m.known[used].add...)
	for _, op := range []string{"lock", "trylock"} {
		m.pending.Add(ctx, 0, m.known[labels{op: op}].add...)
	}
}

// instrument returns i. Package otel handles the error. The instrument can be used
// anyway.
func instrument[T any](i T, err error) T {
	if err != nil {
		otel.Handle(err)
	}
	return i
}

// beginCounters makes the counters exist.
func (m *metrics) beginCounters(ctx context.Context, with measured) {
	for _, c := range []metric.Int64Counter{m.timeouts, m.losses, m.renewalFailures} {
		c.Add(ctx, 0, with.add...)
	}
}

// with returns the attributes of l and key.
func (m *metrics) with(l labels, key string) measured {
	if key == "" {
		if known, ok := m.known[l]; ok {
			return known
		}
	}
	return m.measure(l, key)
}

// measure makes the attributes of l and key.
func (m *metrics) measure(l labels, key string) measured {
	var attrs []attribute.KeyValue
	if l.state != "" {
		attrs = append(attrs, stateKey.String(l.state))
	}
	if l.op != "" {
		attrs = append(attrs, operationKey.String(l.op))
	}
	if l.errorType != "" {
		attrs = append(attrs, errorTypeKey.String(l.errorType))
	}
	set := metric.WithAttributeSet(attribute.NewSet(m.config.attributes(key, attrs...)...))
	return measured{[]metric.AddOption{set}, []metric.RecordOption{set}}
}

// record measures e, whose error has the type kind.
func (m *metrics) record(ctx context.Context, e hasp.Event, kind, key string) {
	switch e.Kind {
	case hasp.EventRequested:
		m.pending.Add(ctx, 1, m.with(labels{op: e.Op}, key).add...)
		if key != "" {
			m.beginCounters(ctx, m.with(labels{}, key))
		}

	case hasp.EventAcquired, hasp.EventRefused:
		m.pending.Add(ctx, -1, m.with(labels{op: e.Op}, key).add...)
		if e.Reentry {
			return // it waited for nothing, and the hold is counted already
		}
		m.waitTime.Record(ctx, e.Wait.Seconds(), m.with(labels{op: e.Op, errorType: kind}, key).record...)
		if e.Kind == hasp.EventAcquired {
			m.count.Add(ctx, 1, m.with(labels{state: "used"}, key).add...)
		} else if e.Op == "lock" && (kind == "held" || kind == "deadline_exceeded") {
			m.timeouts.Add(ctx, 1, m.with(labels{}, key).add...)
		}

	case hasp.EventReleased, hasp.EventLost:
		if kind == "lost" {
			m.losses.Add(ctx, 1, m.with(labels{}, key).add...)
		}
		if e.Reentry {
			return
		}
		m.count.Add(ctx, -1, m.with(labels{state: "used"}, key).add...)
		m.useTime.Record(ctx, e.Hold.Seconds(), m.with(labels{errorType: kind}, key).record...)

	case hasp.EventRenewFailed:
		m.renewalFailures.Add(ctx, 1, m.with(labels{}, key).add...)
	}
}
