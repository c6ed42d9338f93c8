// Package natskv lets caslock keep locks in a key-value bucket of NATS JetStream. Waiters are woken
// by a watch. Use file storage, and three replicas or more if locks must survive the loss of a
// server. After a loss of all data, versions begin again: an old holder may overwrite a new one.
// An account needs the API subjects STREAM.MSG.GET and STREAM.PURGE as well as the key-value ones.
//
// By default the store has no clock: see package caslock for TryLock. If the servers' clocks agree
// within backend.Drift, as by NTP, New can use them; a read of a held key then takes two calls.
package natskv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
)

// Store is a bucket. It is safe for concurrent use.
type Store struct {
	js     jetstream.JetStream
	kv     jetstream.KeyValue
	stream jetstream.Stream // of the bucket; its reads go to the leader
	bucket jetstream.KeyValueConfig
	clock  bool
}

// New returns a store in a bucket of js. The store creates the bucket if there is none, also after
// the server has lost its data. Set clock only if the clocks of the servers agree. The connection
// remains the caller's. Let it reconnect for ever (nats.MaxReconnects(-1)) and keep nothing while
// it is down (nats.ReconnectBufSize(-1)), so that no request is sent after its caller has left.
func New(ctx context.Context, js jetstream.JetStream, bucket jetstream.KeyValueConfig, clock bool) (*Store, error) {
	unfit := fmt.Errorf(
		"natskv: bucket %q: %w: want no TTL, and a History of 1; if the server has another bucket, delete it",
		bucket.Bucket, backend.ErrInvalid)
	if bucket.TTL > 0 || bucket.History > 1 {
		return nil, unfit // before the bucket is created
	}

	kv, err := js.KeyValue(ctx, bucket.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, bucket)
	}
	stream, missing := js.Stream(ctx, "KV_"+bucket.Bucket)
	if err = cmp.Or(err, missing); err != nil {
		return nil, fmt.Errorf("natskv: bucket %q: %w", bucket.Bucket, err)
	}

	config := &stream.CachedInfo().Config
	if config.MaxAge > 0 || config.MaxMsgsPerSubject > 1 {
		return nil, unfit
	}
	// This handle only makes no direct gets. Otherwise a replica that lags could answer a Get.
	config.AllowDirect = false
	return &Store{js, kv, stream, bucket, clock}, nil
}

// Limits says that calls end promptly.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return backend.Network, backend.CancelPrompt
}

// key returns the key of name in the bucket, where a dot separates parts.
func key(name string) string { return "lock." + strings.ReplaceAll(name, ".", "/") }

func version(revision uint64) string { return strconv.FormatUint(revision, 10) }

// revision returns the revision of a version, or 0 for "".
func revision(version string) uint64 {
	r, _ := strconv.ParseUint(version, 10, 64)
	return r
}

// subject returns the subject of the messages of name.
func (s *Store) subject(name string) string { return "$KV." + s.bucket.Bucket + "." + key(name) }

// Get reads the last value of name.
func (s *Store) Get(ctx context.Context, name string) (caslock.Entry, error) {
	m, err := s.stream.GetLastMsgForSubject(ctx, s.subject(name))
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		// The server has lost its data, so create the bucket for the next call.
		_, _ = s.js.CreateKeyValue(ctx, s.bucket)
		return caslock.Entry{}, err
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return caslock.Entry{}, nil
	case err != nil:
		return caslock.Entry{}, err
	}

	// A message with one of these headers says that the value was deleted.
	operation := m.Header.Get("KV-Operation")
	marker := m.Header.Get(jetstream.MarkerReasonHeader)
	if operation != "" || marker != "" {
		return caslock.Entry{}, nil
	}

	e := caslock.Entry{Value: m.Data, Version: version(m.Sequence)}
	if s.clock {
		// This asks for the time after the message was read.
		if now, err := s.js.Stream(ctx, "KV_"+s.bucket.Bucket); err == nil {
			e.Age = now.CachedInfo().TimeStamp.Sub(m.Time)
		}
	}
	return e, nil
}

// Put writes a message if the last message of name has this version.
func (s *Store) Put(ctx context.Context, name string, value []byte, at string) (string, error) {
	var last uint64
	var err error
	if at == "" {
		last, err = s.kv.Create(ctx, key(name), value)
	} else {
		last, err = s.kv.Update(ctx, key(name), value, revision(at))
	}

	var api *jetstream.APIError
	if errors.As(err, &api) {
		switch api.ErrorCode {
		case jetstream.JSErrCodeStreamWrongLastSequence,
			jetstream.JSErrCodeStreamWrongLastSequenceConstant: // another write is in flight
			return "", caslock.ErrConflict
		}
	}
	return version(last), err
}

// Delete purges name up to this version, so a newer version stays, also that of a Put in flight. A
// purge leaves no marker, which would stay for ever. No watch sees a purge, but nobody waits for a
// free key.
func (s *Store) Delete(ctx context.Context, name, at string) error {
	err := s.stream.Purge(ctx,
		jetstream.WithPurgeSubject(s.subject(name)),
		jetstream.WithPurgeSequence(revision(at)+1))
	if err != nil {
		return err
	}

	e, err := s.Get(ctx, name)
	if e.Version != "" {
		return caslock.ErrConflict
	}
	return err
}

// Watch creates a consumer for the changes of name. The library creates it again after an outage,
// and goes on after the last message that it has received.
func (s *Store) Watch(ctx context.Context, name string) (<-chan struct{}, func(), error) {
	own, cancel := context.WithCancel(context.Background())
	defer context.AfterFunc(ctx, cancel)() // bounds only the call of Watch
	w, err := s.kv.Watch(own, key(name), jetstream.UpdatesOnly(), jetstream.MetaOnly())
	if err = cmp.Or(ctx.Err(), err); err != nil {
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

	stop := func() {
		go func() { // because Stop may block
			_ = w.Stop()
			cancel()
		}()
	}
	return changes, stop, nil
}

// Scan reads messages in the order of their revisions, by a watch that reports when there are no
// more.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	from := jetstream.ResumeFromRevision(max(revision(position), 1))
	w, err := s.kv.Watch(own, ">", from, jetstream.IgnoreDeletes())
	if err != nil {
		return nil, "", err
	}

	// The library blocks without a reader, so read until it closes the channel, if it ever does.
	go func() {
		<-own.Done()
		for range w.Updates() {
		}
	}()

	for len(es) < n {
		select {
		case <-ctx.Done():
			return nil, "", ctx.Err()
		case e, ok := <-w.Updates():
			if !ok {
				return nil, "", errors.New("natskv: the watch has ended")
			}
			if e == nil { // there are no more messages
				return es, "", nil
			}
			es = append(es, caslock.Entry{Value: e.Value(), Version: version(e.Revision())})
			next = version(e.Revision() + 1)
		}
	}
	return es, next, nil
}
