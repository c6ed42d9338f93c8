package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	etcd "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	_ "github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/crew"
)

// etcdCaller is a session. One session is enough for distinct keys. Callers that
// want the same key need one each, because a mutex excludes sessions.
type etcdCaller struct {
	c       *etcd.Client
	s       *concurrency.Session
	seconds int
	own     bool // close closes the client as well
}

func openEtcd(_ context.Context, s stores, term time.Duration) (locker, error) {
	c, err := etcd.New(etcd.Config{Endpoints: []string{s.Etcd}, DialTimeout: time.Minute, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	e := &etcdCaller{c: c, seconds: int(max(term.Seconds(), 1)), own: true}
	if e.s, err = concurrency.NewSession(c, concurrency.WithTTL(e.seconds)); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return e, nil
}

func openEtcdlock(ctx context.Context, s stores, term time.Duration) (locker, error) {
	return openURL(ctx, "etcdlock+etcd://"+s.Etcd, term)
}

func (e *etcdCaller) caller(context.Context) (locker, error) {
	s, err := concurrency.NewSession(e.c, concurrency.WithTTL(e.seconds))
	if err != nil {
		return nil, err
	}
	return &etcdCaller{c: e.c, s: s}, nil
}

func (e *etcdCaller) lock(ctx context.Context, key string) (held, error) {
	m := concurrency.NewMutex(e.s, key)
	if err := m.Lock(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

func (e *etcdCaller) close() {
	e.s.Close()
	if e.own {
		e.c.Close()
	}
}

// etcdRole is the role of the process that the etcd server runs in. It has a
// process of its own, so that its CPU time is not counted as its clients'.
const etcdRole = "etcd"

// startEtcd starts that process and returns the address that etcd serves. The
// data is in dir.
func startEtcd(ctx context.Context, dir string) (p *crew.Process, endpoint string, err error) {
	if p, err = crew.Start(etcdRole); err != nil {
		return nil, "", err
	}
	defer context.AfterFunc(ctx, func() { _ = p.Kill() })()
	if err := errors.Join(p.Send(dir), p.Receive(&endpoint)); err != nil {
		p.End()
		return nil, "", fmt.Errorf("etcd does not start: %w", err)
	}
	return p, endpoint, nil
}

// serveEtcd is that process. It receives the directory and sends its address.
// To every later message it answers with the seconds of CPU time it has used.
func serveEtcd(parent *crew.Pipe) error {
	var dir, question string
	if err := parent.Receive(&dir); err != nil {
		return err
	}
	e, err := embedEtcd(dir)
	for n := 1; err != nil && n < 5; n++ { // another program may take the port first
		e, err = embedEtcd(dir)
	}
	if err != nil {
		return err
	}
	defer e.Close()
	<-e.Server.ReadyNotify()

	if err := parent.Send(e.Config().ListenClientUrls[0].Host); err != nil {
		return err
	}
	for parent.Receive(&question) == nil {
		if err := parent.Send(cpuTime().Seconds()); err != nil {
			return err
		}
	}
	return nil
}

func embedEtcd(dir string) (*embed.Etcd, error) {
	c := embed.NewConfig()
	c.Dir, c.LogLevel, c.UnsafeNoFsync = dir, "fatal", true
	for _, u := range []*[]url.URL{&c.ListenClientUrls, &c.ListenPeerUrls} {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		*u = []url.URL{{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", port)}}
	}
	c.AdvertiseClientUrls, c.AdvertisePeerUrls = c.ListenClientUrls, c.ListenPeerUrls
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	return embed.StartEtcd(c)
}
