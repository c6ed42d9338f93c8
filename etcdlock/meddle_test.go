package etcdlock_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hasplock/hasp/etcdlock"
)

// meddler spoils calls of one driver. Each of its functions gets the last part of a
// method's name, such as Txn.
type meddler struct {
	before atomic.Pointer[func(method string) error] // instead of the call, if it returns an error
	after  atomic.Pointer[func(method string) error] // instead of the answer, if it returns an error
}

func (m *meddler) set(before, after func(method string) error) {
	for at, f := range map[*atomic.Pointer[func(string) error]]func(string) error{&m.before: before, &m.after: after} {
		if at.Store(nil); f != nil {
			at.Store(&f)
		}
	}
}

func (m *meddler) intercept(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	name := method[strings.LastIndexByte(method, '/')+1:]
	if f := m.before.Load(); f != nil {
		if err := (*f)(name); err != nil {
			return err
		}
	}
	err := next(ctx, method, req, reply, conn, opts...)
	if f := m.after.Load(); f != nil && err == nil {
		err = (*f)(name)
	}
	return err
}

// lost is the error of a call whose answer does not come.
var lost = status.Error(codes.DeadlineExceeded, "lost by the test")

// losing returns a function that loses the calls of a method.
func losing(method string) func(string) error {
	return func(name string) error {
		if name == method {
			return lost
		}
		return nil
	}
}

// openMeddled opens a driver whose calls the meddler may spoil.
func openMeddled(tb testing.TB, hosts string, o *etcdlock.Options) (*etcdlock.Driver, *meddler) {
	tb.Helper()
	m := &meddler{}
	return openWith(tb, hosts, o, grpc.WithUnaryInterceptor(m.intercept)), m
}

// openWith opens a driver whose connections have an option.
func openWith(tb testing.TB, hosts string, o *etcdlock.Options, dial grpc.DialOption) *etcdlock.Driver {
	tb.Helper()
	d := etcdlock.New(clientv3.Config{Endpoints: strings.Split(hosts, ","), DialOptions: []grpc.DialOption{dial}}, o)
	tb.Cleanup(func() { d.Close() })
	return d
}
