package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	etcd "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// etcdCaller is a session. One is enough for distinct keys; callers who want
// the same key must have one each, since a session is who holds it.
type etcdCaller struct {
	c       *etcd.Client
	s       *concurrency.Session
	seconds int
	own     bool // the client
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

// etcdServer is a process of its own, so that what it costs is not counted as
// its clients'.
type etcdServer struct {
	cmd      *exec.Cmd
	mu       sync.Mutex // guards ask and answers
	ask      interface{ Write([]byte) (int, error) }
	answers  *bufio.Reader
	endpoint string
}

func startEtcd(ctx context.Context, dir string) (*etcdServer, error) {
	cmd, in, out, err := another("etcd")
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	s := &etcdServer{cmd: cmd, ask: in, answers: bufio.NewReader(out)}
	if _, err := fmt.Fprintln(in, dir); err != nil {
		s.stop()
		return nil, err
	}
	if s.endpoint, err = s.answers.ReadString('\n'); err != nil {
		s.stop()
		return nil, fmt.Errorf("etcd does not begin: %w", err)
	}
	s.endpoint = strings.TrimSpace(s.endpoint)
	return s, nil
}

// cpu is how many seconds the server has used.
func (s *etcdServer) cpu() (seconds float64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := fmt.Fprintln(s.ask, "cpu"); err != nil {
		return 0, err
	}
	_, err = fmt.Fscanln(s.answers, &seconds)
	return seconds, err
}

func (s *etcdServer) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// serveEtcd is that process. It ends with its standard input.
func serveEtcd() error {
	in := bufio.NewScanner(os.Stdin)
	if !in.Scan() {
		return nil
	}
	e, err := embedEtcd(in.Text())
	for n := 1; err != nil && n < attempts; n++ {
		e, err = embedEtcd(in.Text())
	}
	if err != nil {
		return err
	}
	defer e.Close()
	<-e.Server.ReadyNotify()
	fmt.Println(e.Config().ListenClientUrls[0].Host)
	for in.Scan() {
		fmt.Println(cpuTime().Seconds())
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
