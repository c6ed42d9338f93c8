// Package natskv lets caslock keep locks in a key-value bucket of NATS JetStream. Waiters are woken
// by a watch.
//
// The bucket has a history of 1. Use file storage, and three replicas or more if a lock must
// survive the loss of a server. A record of a free key is removed after an hour, or by the TTL of
// the bucket, which must be longer than the longest term.
//
// By default the store has no clock: see package caslock for what TryLock means then. With
// Options.Clock the age of a record is the time of the stream less that of the message. Set it if
// the clocks of all servers are kept together, as by NTP, within backend.Drift: after a change of
// the leader, another server's clock counts.
package natskv

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
)

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	Clock bool // the clocks of the servers agree: see the package comment

	// Create is the bucket that New creates if it is missing, and again if the server has lost its
	// data. If its Bucket is empty, New expects that the bucket exists.
	Create jetstream.KeyValueConfig
}

// Store is a bucket. It is safe for concurrent use.
type Store struct {
	js      jetstream.JetStream
	kv      jetstream.KeyValue
	options Options

	mu     sync.Mutex    // guards the fields below
	read   time.Time     // when the server's clock was read, at the latest
	offset time.Duration // how far the server's clock was ahead then, at least
}

// New returns a store in a bucket of js. The connection remains the caller's. Let it reconnect for
// ever (nats.MaxReconnects(-1)) and keep nothing while it is down (nats.ReconnectBufSize(-1)), so
// that a request is not sent after its caller has left.
func New(ctx context.Context, js jetstream.JetStream, bucket string, o *Options) (*Store, error) {
	s := &Store{js: js}
	if o != nil {
		s.options = *o
	}
	var err error
	if s.kv, err = js.KeyValue(ctx, bucket); errors.Is(err, jetstream.ErrBucketNotFound) && s.options.Create.Bucket == bucket {
		s.kv, err = js.CreateKeyValue(ctx, s.options.Create)
	}
	if err != nil {
		return nil, fmt.Errorf("natskv: bucket %q: %w", bucket, err)
	}
	return s, nil
}

// Limits says that calls end promptly.
func (s *Store) Limits() caslock.Limits {
	return caslock.Limits{Reach: backend.Network, Cancellation: backend.CancelPrompt}
}

const maxPlain = 400

// name returns the name of key in the bucket. Bytes that a name may not have are =XX. The name of a
// long key ends with a hash after an =G, which no escaped byte begins with.
func name(key string) string {
	var b strings.Builder
	for i, c := range []byte(key) {
		switch {
		case i == maxPlain && len(key) > maxPlain:
			fmt.Fprintf(&b, "=G%x", sha256.Sum256([]byte(key)))
			return b.String()
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "=%02X", c)
		}
	}
	return b.String()
}

// Get reads the last value of key.
func (s *Store) Get(ctx context.Context, key string) (caslock.Entry, error) {
	e, err := s.kv.Get(ctx, name(key))
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return caslock.Entry{}, nil
	case errors.Is(err, nats.ErrNoResponders) && s.options.Create.Bucket != "":
		_, _ = s.js.CreateKeyValue(ctx, s.options.Create) // the server has lost its data; the next call works
		return caslock.Entry{}, err
	case err != nil:
		return caslock.Entry{}, err
	}
	return caslock.Entry{Value: e.Value(), Version: strconv.FormatUint(e.Revision(), 10), Age: s.age(ctx, e.Created())}, nil
}

// age returns how long ago the server has stored a message, by its own clock, or less.
func (s *Store) age(ctx context.Context, created time.Time) time.Duration {
	if !s.options.Clock {
		return 0
	}
	s.mu.Lock()
	read, offset := s.read, s.offset
	s.mu.Unlock()
	if time.Since(read) > time.Minute { // so that a step of the server's clock does not last
		st, err := s.js.Stream(ctx, "KV_"+s.kv.Bucket())
		if err != nil {
			return 0
		}
		read = time.Now() // after the reply, so the server's clock is not thought to be ahead of itself
		offset = st.CachedInfo().TimeStamp.Sub(read.Round(0))
		s.mu.Lock()
		s.read, s.offset = read, offset
		s.mu.Unlock()
	}
	return read.Round(0).Add(offset + time.Since(read)).Sub(created)
}

// Put writes a message that must follow the one of this version.
func (s *Store) Put(ctx context.Context, key string, value []byte, version string) (string, error) {
	var next uint64
	var err error
	if version == "" {
		next, err = s.kv.Create(ctx, name(key), value)
	} else {
		last, _ := strconv.ParseUint(version, 10, 64)
		next, err = s.kv.Update(ctx, name(key), value, last)
	}
	return strconv.FormatUint(next, 10), conflict(err)
}

// Delete purges key if it has this version.
func (s *Store) Delete(ctx context.Context, key, version string) error {
	last, _ := strconv.ParseUint(version, 10, 64)
	return conflict(s.kv.Purge(ctx, name(key), jetstream.LastRevision(last)))
}

func conflict(err error) error {
	var api *jetstream.APIError
	if errors.Is(err, jetstream.ErrKeyExists) || errors.As(err, &api) && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return caslock.ErrConflict
	}
	return err
}

// Watch makes a consumer for the changes of key. The library makes it again after an outage, and
// goes on after the last message that it has received.
func (s *Store) Watch(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	own, cancel := context.WithCancel(context.Background())
	defer context.AfterFunc(ctx, cancel)() // bounds the call of Watch only
	w, err := s.kv.Watch(own, name(key), jetstream.UpdatesOnly(), jetstream.MetaOnly())
	if err != nil {
		cancel()
		return nil, nil, err
	}
	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes)
		for range w.Updates() {
			select {
			case changes <- struct{}{}:
			default:
			}
		}
	}()
	return changes, func() { go func() { _ = w.Stop(); cancel() }() }, nil
}

// Scan reads messages in the order of their revisions.
func (s *Store) Scan(ctx context.Context, _, position string, n int) (es []caslock.Entry, next string, err error) {
	from, _ := strconv.ParseUint(position, 10, 64)
	c, err := s.js.OrderedConsumer(ctx, "KV_"+s.kv.Bucket(), jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(from, 1)})
	if err != nil {
		return nil, "", err
	}
	batch, err := c.FetchNoWait(n)
	if err != nil {
		return nil, "", err
	}
	got := 0
	for m := range batch.Messages() {
		meta, err := m.Metadata()
		if err != nil {
			return nil, "", err
		}
		got, next = got+1, strconv.FormatUint(meta.Sequence.Stream+1, 10)
		if m.Headers().Get("KV-Operation") == "" { // no marker of a deletion
			es = append(es, caslock.Entry{Value: m.Data(), Version: strconv.FormatUint(meta.Sequence.Stream, 10), Age: s.age(ctx, meta.Timestamp)})
		}
	}
	if got < n {
		next = ""
	}
	return es, next, batch.Error()
}
