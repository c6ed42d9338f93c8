package otelhasp

import (
	"context"
	"slices"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/hasplock/hasp"
)

// bounds are the buckets of both histograms, in seconds. They are set because OpenTelemetry's
// default buckets are meant for milliseconds.
var bounds = []float64{0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 3600}

// metrics contains the instruments of one call of Observe.
type metrics struct {
	config *config
	keys   sync.Map // the values of hasp.key whose counters beginCounters has begun

	mu   sync.RWMutex            // guards sets
	sets map[labels]attributeSet // a cache, because a set is costly to create

	waitTime, useTime                  metric.Float64Histogram
	count, pending, followers, leaders metric.Int64UpDownCounter
	timeouts, losses, renewalFailures  metric.Int64Counter
}

// labels are the attributes that differ between the measurements of an instrument. If a field is
// empty, its attribute is left out.
type labels struct{ state, op, errorType, loss, key string }

// attributeSet is one set of attributes, in the forms that instruments accept.
type attributeSet struct {
	add    []metric.AddOption    // for counters
	record []metric.RecordOption // for histograms
}

// init creates the instruments, and begins those counters at 0 whose attributes are known from the
// start. The counters of a key begin with the first event of the key.
func (m *metrics) init(c *config) {
	m.config = c
	m.sets = map[labels]attributeSet{}

	meter := c.meters.Meter(scope)
	m.waitTime = instrument(meter.Float64Histogram("hasp.client.lock.wait_time",
		metric.WithUnit("s"),
		metric.WithDescription("The time it took to get a lock, or not to get it."),
		metric.WithExplicitBucketBoundaries(bounds...)))
	m.useTime = instrument(meter.Float64Histogram("hasp.client.lock.use_time",
		metric.WithUnit("s"),
		metric.WithDescription("The time between getting a lock and the end of its hold."),
		metric.WithExplicitBucketBoundaries(bounds...)))
	m.count = instrument(meter.Int64UpDownCounter("hasp.client.lock.count",
		metric.WithUnit("{lock}"),
		metric.WithDescription("The number of locks that are held.")))
	m.pending = instrument(meter.Int64UpDownCounter("hasp.client.lock.pending_requests",
		metric.WithUnit("{request}"),
		metric.WithDescription("The number of callers that wait for a lock.")))
	m.followers = instrument(meter.Int64UpDownCounter("hasp.client.lock.followers",
		metric.WithUnit("{follower}"),
		metric.WithDescription("The number of calls of Lead that wait to lead.")))
	m.leaders = instrument(meter.Int64UpDownCounter("hasp.client.lock.leaders",
		metric.WithUnit("{leader}"),
		metric.WithDescription("The number of calls of Lead that lead.")))
	m.timeouts = instrument(meter.Int64Counter("hasp.client.lock.timeouts",
		metric.WithUnit("{timeout}"),
		metric.WithDescription("The number of waits for a lock that timed out.")))
	m.losses = instrument(meter.Int64Counter("hasp.client.lock.losses",
		metric.WithUnit("{loss}"),
		metric.WithDescription("The number of leases that were lost before they were unlocked.")))
	m.renewalFailures = instrument(meter.Int64Counter("hasp.client.lock.renewal_failures",
		metric.WithUnit("{failure}"),
		metric.WithDescription("The number of renewals that failed or were not answered.")))

	// If a counter began at 1, Prometheus would miss the first increase.
	ctx := context.Background()
	m.beginCounters(ctx, "")
	m.count.Add(ctx, 0, m.with(labels{state: "used"}).add...)
	m.followers.Add(ctx, 0, m.with(labels{}).add...)
	m.leaders.Add(ctx, 0, m.with(labels{}).add...)
	for _, op := range []string{"lock", "trylock"} {
		m.pending.Add(ctx, 0, m.with(labels{op: op}).add...)
	}
}

// instrument passes err to otel's error handler, and returns the instrument i, which always works.
func instrument[T any](i T, err error) T {
	if err != nil {
		otel.Handle(err)
	}
	return i
}

// beginCounters starts the counters of the given key at 0.
func (m *metrics) beginCounters(ctx context.Context, key string) {
	for _, c := range []metric.Int64Counter{m.timeouts, m.renewalFailures} {
		c.Add(ctx, 0, m.with(labels{key: key}).add...)
	}
	for _, reason := range lossReasons {
		m.losses.Add(ctx, 0, m.with(labels{loss: reason, key: key}).add...)
	}
}

// with returns the set of the attributes in l and those of WithAttributes.
func (m *metrics) with(l labels) attributeSet {
	m.mu.RLock()
	set, ok := m.sets[l]
	m.mu.RUnlock()
	if ok {
		return set
	}

	attrs := []attribute.KeyValue{
		stateKey.String(l.state),
		operationKey.String(l.op),
		errorTypeKey.String(l.errorType),
		lossKey.String(l.loss),
	}

	isEmpty := func(a attribute.KeyValue) bool { return a.Value.AsString() == "" }
	attrs = slices.DeleteFunc(attrs, isEmpty)
	option := metric.WithAttributeSet(attribute.NewSet(m.config.attributes(l.key, attrs...)...))
	set = attributeSet{[]metric.AddOption{option}, []metric.RecordOption{option}}

	// If another goroutine has stored the same set since, replace it, because the two are equal.
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sets[l] = set
	return set
}

// opLead is the Op of events of Lead.
const opLead = "lead"

// record measures the event e. The argument kind is the error.type of e.
func (m *metrics) record(ctx context.Context, e hasp.Event, kind, key string) {
	switch {
	case e.Kind == hasp.EventRequested && key != "":
		_, hasBegun := m.keys.LoadOrStore(key, true)
		if !hasBegun {
			m.beginCounters(ctx, key)
		}
	case e.Kind == hasp.EventRenewFailed:
		m.renewalFailures.Add(ctx, 1, m.with(labels{key: key}).add...)
	case kind == "lost" && (e.Kind == hasp.EventReleased || e.Kind == hasp.EventLost):
		m.losses.Add(ctx, 1, m.with(labels{loss: lossReason(e.Err), key: key}).add...)
	}

	if e.Op == opLead {
		m.lead(ctx, e, kind, key)
	} else {
		m.lock(ctx, e, kind, key)
	}
}

// The method lock measures the event e of a call of Lock, TryLock or Resume.
func (m *metrics) lock(ctx context.Context, e hasp.Event, kind, key string) {
	switch e.Kind {
	case hasp.EventRequested:
		m.pending.Add(ctx, 1, m.with(labels{op: e.Op, key: key}).add...)

	case hasp.EventAcquired, hasp.EventRefused:
		m.pending.Add(ctx, -1, m.with(labels{op: e.Op, key: key}).add...)
		if e.Reentry {
			return // there was no wait, and the hold is counted already
		}
		wait := m.with(labels{op: e.Op, errorType: kind, key: key})
		m.waitTime.Record(ctx, e.Wait.Seconds(), wait.record...)

		isTimeout := kind == "held" || kind == "deadline_exceeded"
		switch {
		case e.Kind == hasp.EventAcquired:
			m.count.Add(ctx, 1, m.with(labels{state: "used", key: key}).add...)
		case e.Op == "lock" && isTimeout: // a TryLock does not wait, so it does not time out
			m.timeouts.Add(ctx, 1, m.with(labels{key: key}).add...)
		}

	case hasp.EventReleased, hasp.EventDetached, hasp.EventLost:
		if e.Reentry {
			return // the hold of the outer lease goes on
		}
		m.count.Add(ctx, -1, m.with(labels{state: "used", key: key}).add...)
		m.useTime.Record(ctx, e.Hold.Seconds(), m.with(labels{errorType: kind, key: key}).record...)
	}
}

// The method lead measures the event e of a call of Lead. It records the wait of a call only if the
// call does not lead. A follower may wait for as long as another process leads, and such waits
// would hide the waits of Lock.
func (m *metrics) lead(ctx context.Context, e hasp.Event, kind, key string) {
	add := m.with(labels{key: key}).add
	switch e.Kind {
	case hasp.EventRequested:
		m.followers.Add(ctx, 1, add...)
	case hasp.EventAcquired:
		m.followers.Add(ctx, -1, add...)
		m.leaders.Add(ctx, 1, add...)
	case hasp.EventRefused:
		m.followers.Add(ctx, -1, add...)
		wait := m.with(labels{op: opLead, errorType: kind, key: key})
		m.waitTime.Record(ctx, e.Wait.Seconds(), wait.record...)
	case hasp.EventReleased, hasp.EventDetached, hasp.EventLost:
		m.leaders.Add(ctx, -1, add...)
	}
}
