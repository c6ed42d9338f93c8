package etcdlock_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
)

// meddler spoils the calls and streams of one driver. A method is the last part of its name, such
// as Txn.
type meddler struct {
	mu     sync.Mutex                // guards all below
	before func(method string) error // instead of the call, if it returns an error
	after  func(method string) error // instead of the answer, if it returns an error
	change func(msg any)             // is called before a message of a stream is sent, and after one was received
	mute   map[string]int            // how many of the next calls or streams of a method get no answer
}

func (m *meddler) set(before, after func(method string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before, m.after = before, after
}

// changing sets what is done to each message of a stream.
func (m *meddler) changing(change func(msg any)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.change = change
}

// silence makes the next calls or streams of a method send nothing, so that no answer comes.
func (m *meddler) silence(method string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mute = map[string]int{method: n}
}

// isMute reports whether the call or stream that begins now sends nothing.
func (m *meddler) isMute(method string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mute[method] == 0 {
		return false
	}
	m.mute[method]--
	return true
}

func nameOf(method string) string { return method[strings.LastIndexByte(method, '/')+1:] }

func (m *meddler) intercept(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	m.mu.Lock()
	before := m.before
	m.mu.Unlock()
	if before != nil {
		if err := before(nameOf(method)); err != nil {
			return err
		}
	}
	if m.isMute(nameOf(method)) {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	err := next(ctx, method, req, reply, conn, opts...)
	m.mu.Lock()
	after := m.after
	m.mu.Unlock()
	if after != nil && err == nil {
		err = after(nameOf(method))
	}
	return err
}

func (m *meddler) stream(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := next(ctx, desc, conn, method, opts...)
	if err != nil {
		return nil, err
	}
	return meddled{stream, m, m.isMute(nameOf(method))}, nil
}

// meddled is a stream of a driver with a meddler.
type meddled struct {
	grpc.ClientStream
	m    *meddler
	mute bool
}

func (s meddled) SendMsg(msg any) error {
	if s.mute {
		return nil
	}
	s.m.see(msg)
	return s.ClientStream.SendMsg(msg)
}

func (s meddled) RecvMsg(msg any) error {
	err := s.ClientStream.RecvMsg(msg)
	if err == nil {
		s.m.see(msg)
	}
	return err
}

func (m *meddler) see(msg any) {
	m.mu.Lock()
	change := m.change
	m.mu.Unlock()
	if change != nil {
		change(msg)
	}
}

// lost is the error of a call whose answer does not come.
var lost = status.Error(codes.DeadlineExceeded, "lost by the test")

// failing returns a function that fails the calls of a method.
func failing(method string, err error) func(string) error {
	return func(name string) error {
		if name == method {
			return err
		}
		return nil
	}
}

// stop makes the next call of a method wait until goOn is closed. The call closes began.
func (m *meddler) stop(method string) (began, goOn chan struct{}) {
	began, goOn = make(chan struct{}), make(chan struct{})
	var stopped atomic.Bool
	m.set(func(name string) error {
		if name == method && !stopped.Swap(true) {
			close(began)
			<-goOn
		}
		return nil
	}, nil)
	return began, goOn
}

// openMeddled opens a driver whose calls and streams the meddler may spoil.
func openMeddled(tb testing.TB, hosts string, o *etcdlock.Options) (*etcdlock.Driver, *meddler) {
	tb.Helper()
	m := &meddler{}
	d := await.Value(etcdlock.NewDriver(clientv3.Config{Endpoints: strings.Split(hosts, ","),
		DialOptions: []grpc.DialOption{grpc.WithUnaryInterceptor(m.intercept), grpc.WithStreamInterceptor(m.stream)}}, o)).(*etcdlock.Driver)
	tb.Cleanup(func() { d.Close() })
	return d, m
}
