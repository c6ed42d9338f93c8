package etcdlock_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
)

// muffler can lose what the next stream of a method sends, so that no answer comes. It can also
// change what streams send and receive.
type muffler struct {
	mu     sync.Mutex
	mute   string        // a method
	change func(msg any) // is called before a message is sent, and after one was received
}

type muffled struct {
	grpc.ClientStream
	m    *muffler
	mute bool
}

func (s muffled) SendMsg(msg any) error {
	if s.mute {
		return nil
	}
	s.m.see(msg)
	return s.ClientStream.SendMsg(msg)
}

func (s muffled) RecvMsg(msg any) error {
	err := s.ClientStream.RecvMsg(msg)
	if err == nil {
		s.m.see(msg)
	}
	return err
}

func (m *muffler) see(msg any) {
	m.mu.Lock()
	change := m.change
	m.mu.Unlock()
	if change != nil {
		change(msg)
	}
}

// changing sets what is done to each message.
func (m *muffler) changing(change func(msg any)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.change = change
}

func (m *muffler) silence(method string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mute = method
}

func (m *muffler) open(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := next(ctx, desc, conn, method, opts...)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	mute := m.mute == method[strings.LastIndexByte(method, '/')+1:]
	if mute {
		m.mute = ""
	}
	return muffled{stream, m, mute}, nil
}

func openMuffled(t *testing.T, host string) (*etcdlock.Driver, *muffler) {
	t.Helper()
	m := &muffler{}
	return openWith(t, host, nil, grpc.WithStreamInterceptor(m.open)), m
}

// One keep-alive of many is stuck. The other holds are renewed in time, and that one by the next
// renewal.
func TestStuckKeepAlives(t *testing.T) {
	t.Parallel()
	d, m := openMuffled(t, startServers(t, 1)[0].Client)
	var cs []backend.Claim
	for i := range 64 {
		cs = append(cs, take(t, d, fmt.Sprint("key-", i), 5*time.Minute))
	}
	renewals := func() (failed int) {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		failed = len(cs)
		for _, err := range renewAll(ctx, d, cs) {
			if err == nil {
				failed--
			}
		}
		return failed
	}
	m.silence("LeaseKeepAlive")
	if n := renewals(); n != 1 {
		t.Errorf("%d of 64 renewals failed, with one stuck", n)
	}
	eventually(t, "renewals after", func() (err error) {
		if n := renewals(); n > 0 {
			err = fmt.Errorf("%d renewals failed", n)
		}
		return err
	})
}

// The keep-alive of a waiter is stuck. The waiter keeps its place.
func TestStuckKeepAliveOfAWaiter(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d, m := openMuffled(t, s.Client)
	h := openDriver(t, s.Client)
	c := take(t, h, "key", 5*time.Minute)
	m.silence("LeaseKeepAlive")
	w := wants(t, d, "key")
	queued(t, h, "key", 1)
	places := func() string {
		r, err := plainClient(t, s.Client).Get(context.Background(), "hasp/key/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, kv := range r.Kvs {
			all = append(all, string(kv.Key))
		}
		return strings.Join(all, " ")
	}
	before := places()
	time.Sleep(8 * time.Second) // the window is 5 s
	if after := places(); after != before {
		t.Errorf("the places are %q, and were %q", after, before)
	}
	free(t, h, c)
	free(t, d, w.granted(t))
}
