package main

import (
	"context"
	"errors"
	"time"

	etcd "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

// etcdCaller is an etcd session. Callers of distinct keys share one session. Callers of the same
// key need a session each, because etcd's mutex excludes only other sessions.
type etcdCaller struct {
	c       *etcd.Client
	s       *concurrency.Session
	seconds int
}

func openEtcd(_ context.Context, s stores, term time.Duration) (locker, error) {
	c, err := etcd.New(etcd.Config{Endpoints: []string{s.Etcd}, DialTimeout: time.Minute,
		Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	e := &etcdCaller{c: c, seconds: int(max(term.Seconds(), 1))}
	if e.s, err = concurrency.NewSession(c, concurrency.WithTTL(e.seconds)); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return e, nil
}

func (e *etcdCaller) caller(context.Context) (locker, error) {
	s, err := concurrency.NewSession(e.c, concurrency.WithTTL(e.seconds))
	return &etcdCaller{c: e.c, s: s}, err
}

func (e *etcdCaller) lock(ctx context.Context, key string) (held, error) {
	m := concurrency.NewMutex(e.s, key)
	return m, m.Lock(ctx)
}

func (e *etcdCaller) close() {
	e.s.Close()
	e.c.Close()
}
