// Package natskv keeps locks in a key-value bucket of NATS JetStream. It is the strategy nats:
//
//	hasp.Open(ctx, "nats://user:password@host:4222,host2:4222/bucket?replicas=3", nil)
//
// The hosts are the members of one cluster. If there are several, Open refuses a server that belongs
// to no cluster.
//
// In place of user:password, the URL may have a token. With nats+tls:// the connection has TLS, and
// with nats:// it has TLS if the server asks for it. The parameters:
//
//   - create: whether to create the bucket if there is none, also after the server has lost its
//     data. The default is true.
//   - replicas: how many servers keep the bucket. A new bucket gets 1 by default. An existing
//     bucket with fewer is refused.
//   - clock: true if the servers' clocks agree within [backend.Drift], as by NTP. Then a TryLock
//     of a new process gets the key of a dead holder (see package caslock), and a read of a held
//     key takes two calls. The default is false.
//   - creds, ca, cert, key: files of user credentials, of an authority, and of a client certificate
//     with its key. They are read again at each reconnect.
//
// Waiters are woken by a watch. Use file storage, and three replicas or more if locks must survive
// the loss of a server.
//
// # Loss of power
//
// A NATS server confirms a write before the write is on its disk. By default it syncs the disk
// every two minutes. If its machine loses power or its kernel crashes, the confirmed writes of the
// last two minutes may be lost. Then a key that is held may be granted to another caller. Three
// replicas do not prevent that if the machines fail together, and may not prevent it if one machine
// fails while another replica lags. The end of the process, as by kill -9, loses nothing. To lose
// nothing in a power cut either, put this into the configuration of each server; each write then
// waits for the disk:
//
//	jetstream { sync_interval: always }
//
// After a loss of data, versions begin again, so an old holder may overwrite a new one.
package natskv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
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
	clock  bool // the clocks of the servers agree within backend.Drift
	create bool // create the bucket if there is none
}

// New returns a store in a bucket of js. The store creates the bucket if there is none, also after
// the server has lost its data. Set clock only if the clocks of the servers agree. The connection
// remains the caller's. Let it reconnect for ever (nats.MaxReconnects(-1), IgnoreAuthErrorAbort),
// and keep nothing while it is down (nats.ReconnectBufSize(-1)), so that no request is sent after
// its caller has left. Let it notice within seconds that a server is gone (nats.PingInterval).
func New(
	ctx context.Context, js jetstream.JetStream, bucket jetstream.KeyValueConfig, clock bool,
) (*Store, error) {
	return newStore(ctx, js, bucket, clock, true)
}

// newStore returns a store as New does, but creates the bucket only if create is set.
func newStore(
	ctx context.Context, js jetstream.JetStream, bucket jetstream.KeyValueConfig, clock, create bool,
) (*Store, error) {
	unfit := fmt.Errorf("natskv: bucket %q: %w: want a JetStream, no TTL, and a History of 1; "+
		"if the server has another bucket, delete it", bucket.Bucket, backend.ErrInvalid)
	if js == nil || bucket.TTL > 0 || bucket.History > 1 {
		return nil, unfit // before the bucket is created, because a server accepts these settings
	}

	kv, err := js.KeyValue(ctx, bucket.Bucket)
	if create && errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, bucket)
	}

	var stream jetstream.Stream
	if err == nil {
		stream, err = js.Stream(ctx, "KV_"+bucket.Bucket)
	}
	if err != nil {
		return nil, fmt.Errorf("natskv: bucket %q: %w", bucket.Bucket, backend.Outage(ctx, err))
	}

	// A bucket that exists may have other settings than the caller's.
	config := &stream.CachedInfo().Config
	if config.MaxAge > 0 || config.MaxMsgsPerSubject > 1 {
		return nil, unfit
	}
	if config.Replicas < bucket.Replicas {
		return nil, fmt.Errorf("natskv: bucket %q: %w: it has fewer than %d replicas: "+
			"nats stream edit KV_%[1]s --replicas %[3]d", bucket.Bucket, backend.ErrInvalid,
			bucket.Replicas)
	}

	// Only this handle changes, and not the bucket: its reads go to the leader. With direct gets, a
	// replica that lags could answer a Get.
	config.AllowDirect = false
	return &Store{js, kv, stream, bucket, clock, create}, nil
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

// operationHeader is the header of a marker: a message that says that its key was deleted.
const operationHeader = "KV-Operation"

// all stands for all names in a call of last. In a subject, ">" matches all that follows.
const all = ">"

// subject returns the subject of the messages of name.
func (s *Store) subject(name string) string { return "$KV." + s.bucket.Bucket + "." + key(name) }

// last returns the last message of name, or of the whole bucket if name is all. If the message is a
// marker, which says that the value was deleted, isMarker is true. If there is no message, m and
// err are nil.
func (s *Store) last(
	ctx context.Context, name string,
) (m *jetstream.RawStreamMsg, isMarker bool, err error) {
	// While the servers elect a leader, they refuse a read at once instead of waiting for the
	// leader. An election is short, so ask again until ctx ends.
	subject := s.subject(name)
	m, err = s.stream.GetLastMsgForSubject(ctx, subject)
	for codeOf(err) == codeNoLeader && ctx.Err() == nil {
		time.Sleep(20 * time.Millisecond)
		m, err = s.stream.GetLastMsgForSubject(ctx, subject)
	}

	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}

	// Delete writes markers with the first header. The server itself writes markers with the second
	// header, when a message has expired.
	isMarker = m.Header.Get(operationHeader) != "" ||
		m.Header.Get(jetstream.MarkerReasonHeader) != ""
	return m, isMarker, nil
}

// Get reads the last value of name. If there is none, the Entry is zero.
func (s *Store) Get(ctx context.Context, name string) (caslock.Entry, error) {
	m, isMarker, err := s.last(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) && s.create {
		// The server has lost its data, so create the bucket for the next call.
		_, _ = s.js.CreateKeyValue(ctx, s.bucket)
	}
	if m == nil || isMarker { // there is an error, or no value
		return caslock.Entry{}, err
	}

	e := caslock.Entry{Value: m.Data, Version: version(m.Sequence)}
	if s.clock {
		// A read of the message does not tell the server's time, but a read of the stream does.
		// That time is before the end of this Get, so Age is not too large. If the second read
		// fails, the age is unknown.
		if stream, err := s.js.Stream(ctx, "KV_"+s.bucket.Bucket); err == nil {
			e.Age = stream.CachedInfo().TimeStamp.Sub(m.Time)
		}
	}

	return e, nil
}

// write writes a message if the last message of name has this revision, or if there is none and the
// revision is 0. Otherwise the error is caslock.ErrConflict.
func (s *Store) write(
	ctx context.Context, name string, m *nats.Msg, at uint64,
) (revision uint64, err error) {
	m.Subject = s.subject(name)
	ack, err := s.js.PublishMsg(ctx, m, jetstream.WithExpectLastSequencePerSubject(at))
	switch codeOf(err) {
	case jetstream.JSErrCodeStreamWrongLastSequence,
		jetstream.JSErrCodeStreamWrongLastSequenceConstant: // another write of name is in flight
		return 0, caslock.ErrConflict
	}

	if err != nil {
		return 0, err
	}
	return ack.Sequence, nil
}

// Put writes a message if the last message of name has this version. If at is "", name must have no
// message, or a marker as its last one.
func (s *Store) Put(ctx context.Context, name string, value []byte, at string) (string, error) {
	n, err := s.write(ctx, name, &nats.Msg{Data: value}, revision(at))
	if at == "" && errors.Is(err, caslock.ErrConflict) {
		// The last message may be a marker that a Delete has not purged. Then the name is absent,
		// and its new value comes after the marker. After an error of last, return the conflict,
		// which is true: the first write has changed nothing.
		m, isMarker, lastErr := s.last(ctx, name)
		if lastErr == nil && isMarker {
			n, err = s.write(ctx, name, &nats.Msg{Data: value}, m.Sequence)
		}
	}

	if err != nil {
		return "", err
	}
	return version(n), nil
}

// Delete writes a marker if the last message of name has this version, and then purges the marker,
// which would stay for ever. The purge ends at the marker, so it keeps a Put that came after it.
func (s *Store) Delete(ctx context.Context, name, at string) error {
	marker := &nats.Msg{Header: nats.Header{operationHeader: {"DEL"}}}
	n, err := s.write(ctx, name, marker, revision(at))
	if err != nil {
		return err
	}

	// If the purge fails, the marker stays until the next Put, which replaces it.
	return s.stream.Purge(ctx,
		jetstream.WithPurgeSubject(s.subject(name)),
		jetstream.WithPurgeSequence(n+1)) // the first message that stays
}

// Watch creates a consumer for the changes of name. The library creates it again after an outage,
// and goes on after the last message that it has received.
func (s *Store) Watch(ctx context.Context, name string) (<-chan struct{}, func(), error) {
	// The watch goes on after the end of ctx, which bounds only this call. So the watch gets a
	// context of its own, and ctx cancels that until Watch returns.
	own, cancel := context.WithCancel(context.Background())
	defer context.AfterFunc(ctx, cancel)() // from the return on, ctx does not cancel own
	w, err := s.kv.Watch(own, key(name), jetstream.UpdatesOnly(), jetstream.MetaOnly())
	err = cmp.Or(ctx.Err(), err) // if ctx has ended, own ends as well, so the watch is of no use
	if err != nil {
		cancel()
		return nil, nil, err
	}

	changes := make(chan struct{}, 1)
	go func() {
		defer close(changes) // if the watch breaks, or stop ends it
		for range w.Updates() {
			select {
			case changes <- struct{}{}:
			default: // a signal waits already
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

// askAgain is the time without a message after which Scan asks for the last message again.
const askAgain = 20 * time.Millisecond

// Scan reads messages in the order of their revisions, by a watch that begins at the position,
// which is a revision. The watch reports with nil that there are no more messages, but that may be
// too early while others write. So Scan first asks the leader for the last message, and ends there.
// Another caller may delete that message meanwhile, so that the watch never delivers it. So if no
// message comes for a while, Scan asks for the last message again.
func (s *Store) Scan(
	ctx context.Context, position string, n int,
) (es []caslock.Entry, next string, err error) {
	last, _, err := s.last(ctx, all)
	if last == nil {
		return nil, "", err
	}

	own, cancel := context.WithCancel(ctx)
	defer cancel()
	from := max(revision(position), 1)
	w, err := s.kv.Watch(own, key(all), jetstream.ResumeFromRevision(from))
	if err != nil {
		return nil, "", err
	}

	// The library blocks if its channel is full. So after Scan, read until the library closes the
	// channel, which it does when own has ended the subscription.
	go func() {
		<-own.Done()
		for range w.Updates() {
		}
	}()

	end := last.Sequence
	for at := from; at <= end; { // at is the first revision that has not been read
		if len(es) == n {
			return es, version(at), nil
		}

		select {
		case <-ctx.Done():
			return nil, "", ctx.Err()
		case e, ok := <-w.Updates():
			if !ok {
				return nil, "", errors.New("natskv: the watch has ended")
			}
			if e == nil {
				continue // the watch reports that there are no more messages
			}
			at = e.Revision() + 1
			if e.Operation() == jetstream.KeyValuePut { // else the message is a marker
				es = append(es, caslock.Entry{Value: e.Value(), Version: version(e.Revision())})
			}
		case <-time.After(askAgain):
			last, _, err := s.last(ctx, all)
			if err != nil {
				return nil, "", err
			}
			if last == nil {
				return es, "", nil // all messages were deleted
			}

			// If the message at end was deleted, end before it. If others have written meanwhile,
			// keep end, so that the Scan does not follow them for ever.
			end = min(end, last.Sequence)
		}
	}

	return es, "", nil
}
