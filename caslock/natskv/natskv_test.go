package natskv_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/natskv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// harness returns a harness for a bucket of n.
func harness(t *testing.T, n *node, params string) conformance.Harness {
	start := func(_ context.Context, data bool) (string, error) {
		if !data {
			n.dir = t.TempDir()
		}
		err := n.start()
		return n.addr, err
	}
	h := adaptertest.Harness(start, n.stop, func(addr string) string {
		return "nats://" + addr + "/locks?" + params
	})
	h.Kick = func(context.Context, string) error {
		for _, c := range await.Value(n.s.Connz(&server.ConnzOptions{Limit: 1000})).Conns {
			_ = n.s.DisconnectClientByID(c.Cid) // an error says that it has gone meanwhile
		}
		return nil
	}
	return h
}

func TestConformance(t *testing.T) {
	adaptertest.Clocks(t, func(t *testing.T, params string) conformance.Harness {
		return harness(t, &node{}, params)
	})
}

// These are the promises of a Store that the suite does not check, on one server.
func TestStore(t *testing.T) {
	t.Parallel()
	// The user gets no messages of a watch, which come to an inbox without further parts.
	deaf := &server.SubjectPermission{Deny: []string{"_INBOX.*"}}
	n := startNode(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: "any", Permissions: &server.Permissions{Subscribe: deaf}}}
		o.NoAuthUser = "any"
	})
	ctx := t.Context()
	nc, js := n.connect(t)
	s := await.Value(natskv.New(ctx, js, jetstream.KeyValueConfig{Bucket: "locks"}, false))

	// A bucket whose values end by themselves cannot keep holds.
	short := jetstream.KeyValueConfig{Bucket: "short", TTL: time.Minute}
	await.ErrorIs(t, "a bucket with a TTL",
		await.ErrorOf(natskv.New(ctx, js, short, false)), backend.ErrInvalid)
	await.Value(js.CreateKeyValue(ctx, short)) // New has not created it
	short.TTL = 0
	await.ErrorIs(t, "a bucket of the server with a TTL",
		await.ErrorOf(natskv.New(ctx, js, short, false)), backend.ErrInvalid)

	// A Scan whose messages do not come is not the end of the list.
	one := await.Value(s.Put(ctx, "key", []byte("1"), ""))
	within, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if es, next, err := s.Scan(within, "", 10); err == nil {
		t.Errorf("Scan without messages: %v, %q", es, next)
	}

	// A Delete keeps any other version. A driver may name a later one from before a loss of data.
	two := await.Value(s.Put(ctx, "key", []byte("2"), one))
	for _, other := range []string{one, two + "0"} {
		if err := s.Delete(ctx, "key", other); !errors.Is(err, caslock.ErrConflict) {
			t.Errorf("Delete of version %s while the key has %s: %v", other, two, err)
		}
	}

	// A Delete leaves nothing behind, and the name can be created again.
	e, err := s.Get(ctx, "key")
	await.Must(t, errors.Join(err, s.Delete(ctx, "key", two)))
	left := await.Value(js.Stream(ctx, "KV_locks")).CachedInfo().State.Msgs
	if e.Version != two || left > 0 {
		t.Errorf("Get: version %s, want %s; Delete has left %d messages", e.Version, two, left)
	}
	await.ErrorIs(t, "Delete of an absent key", s.Delete(ctx, "key", two), caslock.ErrConflict)
	await.Value(s.Put(ctx, "key", []byte("3"), ""))

	// A marker whose purge has not come is an absent key.
	kv := await.Value(js.KeyValue(ctx, "locks"))
	await.Must(t, kv.Delete(ctx, "lock.key"))
	if e, err := s.Get(ctx, "key"); e.Version != "" || err != nil {
		t.Errorf("Get of a marker: %v, %v", e, err)
	}
	await.Value(s.Put(ctx, "key", []byte("4"), ""))

	// A direct get would be answered by any replica, also by one that lags.
	direct := await.Value(nc.SubscribeSync("$JS.API.DIRECT.GET.>"))
	await.Value(s.Get(ctx, "key"))
	await.Must(t, nc.Flush())
	if n, _, _ := direct.Pending(); n > 0 {
		t.Error("Get has made a direct get")
	}
}

func ExampleNew() {
	ctx := context.Background()
	var js jetstream.JetStream // its connection has MaxReconnects(-1) and ReconnectBufSize(-1)
	store, err := natskv.New(ctx, js, jetstream.KeyValueConfig{Bucket: "locks", Replicas: 3}, false)
	if err != nil {
		panic(err)
	}
	locks, err := caslock.New(ctx, store, nil)
	if err != nil {
		panic(err)
	}
	defer locks.Close()
}

// early is a JetStream whose watches report too early that there are no more messages.
type early struct{ jetstream.JetStream }

func (j early) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	kv, err := j.JetStream.KeyValue(ctx, bucket)
	return earlyBucket{kv}, err
}

type earlyBucket struct{ jetstream.KeyValue }

func (b earlyBucket) Watch(
	ctx context.Context, keys string, o ...jetstream.WatchOpt,
) (jetstream.KeyWatcher, error) {
	w, err := b.KeyValue.Watch(ctx, keys, o...)
	if err != nil {
		return nil, err
	}
	updates := make(chan jetstream.KeyValueEntry)
	go func() {
		defer close(updates)
		updates <- nil
		for e := range w.Updates() {
			if e != nil {
				updates <- e
			}
		}
	}()
	return earlyWatcher{w, updates}, nil
}

type earlyWatcher struct {
	jetstream.KeyWatcher
	updates chan jetstream.KeyValueEntry
}

func (w earlyWatcher) Updates() <-chan jetstream.KeyValueEntry { return w.updates }

// The watch of a Scan reports too early that there are no more messages, as while others write. The
// Scan has all records nevertheless.
func TestScanThatEndsEarly(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil)
	_, js := n.connect(t)
	config := jetstream.KeyValueConfig{Bucket: "locks"}
	kv := await.Value(js.CreateKeyValue(t.Context(), config))
	s := await.Value(natskv.New(t.Context(), early{js}, config, false))
	for i := range 5 {
		await.Value(s.Put(t.Context(), fmt.Sprint("key", i), []byte("x"), ""))
	}
	await.Must(t, kv.Delete(t.Context(), "lock.key4")) // leaves a marker at the end

	es, next, err := s.Scan(t.Context(), "", 100)
	if len(es) != 4 || next != "" || err != nil {
		t.Errorf("%d records, next %q, %v: want 4, and no more", len(es), next, err)
	}
	es, next, err = s.Scan(t.Context(), "", 3)
	if len(es) != 3 || next == "" || err != nil {
		t.Errorf("%d records, next %q, %v: want a page of 3", len(es), next, err)
	}
}

// Another caller deletes the last message while a Scan waits for it, and nobody writes after that.
func TestScanBesideADelete(t *testing.T) {
	t.Parallel()
	n := startNode(t, nil)
	_, js := n.connect(t)
	s := await.Value(natskv.New(t.Context(), js, jetstream.KeyValueConfig{Bucket: "locks"}, false))
	await.Value(s.Put(t.Context(), "first", []byte("x"), ""))
	for i := range 200 {
		name := fmt.Sprint("last", i)
		at := await.Value(s.Put(t.Context(), name, []byte("x"), ""))
		deleted := make(chan error, 1)
		go func() { deleted <- s.Delete(t.Context(), name, at) }()
		if _, _, err := s.Scan(t.Context(), "", 100); err != nil {
			t.Fatal(err)
		}
		await.Must(t, <-deleted)
	}
}
