package main

import (
	"context"
	"errors"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/testhost"
	"github.com/hasplock/hasp/internal/torture/rig"
)

// openPlainEtcd starts the servers of openEtcd, for clients that get only addresses.
func openPlainEtcd(l *redistest.Lab, where testhost.Where) *rig.Store {
	s := openEtcd(l, where)
	s.URL = func(addrs []string) string { return strings.Join(addrs, ",") }
	return s
}

func openHasp(ctx context.Context, addrs []string, term time.Duration) (rig.Locker, error) {
	return rig.OpenHasp(ctx, "etcdlock+etcd://"+strings.Join(addrs, ","), term)
}

// locker is etcd's package concurrency. A mutex excludes sessions, so each Lock has a session
// of its own. The session renews itself.
type locker struct {
	c    *clientv3.Client
	term time.Duration
}

func openConcurrency(_ context.Context, addrs []string, term time.Duration) (rig.Locker, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: addrs, DialTimeout: patience, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	return &locker{c, term}, nil
}

func (l *locker) Lock(ctx context.Context, key string) (rig.Held, error) {
	grant, err := l.c.Grant(ctx, int64(l.term/time.Second)) // NewSession would wait without a limit
	if err != nil {
		return nil, err
	}
	s, err := concurrency.NewSession(l.c, concurrency.WithLease(grant.ID))
	if err != nil {
		return nil, err
	}
	m := concurrency.NewMutex(s, key)
	if err := m.Lock(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &held{s, m}, nil
}

func (l *locker) Close() error { return l.c.Close() }

type held struct {
	s *concurrency.Session
	m *concurrency.Mutex
}

func (h *held) Lost() <-chan struct{} { return h.s.Done() }

func (*held) Until() time.Time { return time.Time{} }

func (h *held) Unlock(ctx context.Context) error {
	return errors.Join(h.m.Unlock(ctx), h.s.Close())
}
