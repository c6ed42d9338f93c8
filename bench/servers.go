package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// servers are those that this program has started.
type servers struct {
	dir  string
	ends []func()
	etcd *etcdServer
}

// start starts what the contestants need and is not there.
func (s *servers) start(ctx context.Context, url string, all []contestant) (at stores, err error) {
	if s.dir, err = os.MkdirTemp("", "hasp-bench-"); err != nil {
		return at, err
	}
	needs := map[int]bool{}
	for _, c := range all {
		needs[c.nodes] = true
	}
	if at.One = url; url == "" {
		if at.One, err = s.redis(ctx); err != nil {
			return at, fmt.Errorf("%w; name one that runs with --redis", err)
		}
	}
	if needs[5] {
		for range 5 {
			url, err := s.redis(ctx)
			if err != nil {
				return at, fmt.Errorf("%w; leave out those that need five with --only", err)
			}
			at.Five = append(at.Five, url)
		}
	}
	if needs[0] {
		if s.etcd, err = startEtcd(ctx, filepath.Join(s.dir, "etcd")); err != nil {
			return at, err
		}
		s.ends = append(s.ends, s.etcd.stop)
		at.Etcd = s.etcd.endpoint
	}
	return at, nil
}

// redis starts a redis-server that writes nothing to disk.
func (s *servers) redis(ctx context.Context) (url string, err error) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return "", err
	}
	for range attempts {
		if url, err = s.redisOnce(ctx); err == nil || ctx.Err() != nil {
			break
		}
	}
	return url, err
}

// attempts are made to start a server, whose port another program may take
// first.
const attempts = 5

func (s *servers) redisOnce(ctx context.Context) (url string, err error) {
	port, err := freePort()
	if err != nil {
		return "", err
	}
	cmd := exec.Command("redis-server", "--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--save", "", "--appendonly", "no", "--dir", s.dir)
	endWithParent(cmd)
	if err := cmd.Start(); err != nil {
		return "", err
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	s.ends = append(s.ends, func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	url = fmt.Sprint("redis://127.0.0.1:", port)
	rdb, err := connect(url)
	if err != nil {
		return "", err
	}
	defer rdb.Close()
	for {
		info, err := rdb.Info(ctx, "server").Result()
		if strings.Contains(info, fmt.Sprintf("process_id:%d\r", cmd.Process.Pid)) {
			return url, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ended:
			return "", errors.New("redis-server ends at once")
		case <-ctx.Done():
			return "", errors.Join(errors.New("redis-server does not answer"), err)
		}
	}
}

func (s *servers) stop() {
	for _, end := range s.ends {
		end()
	}
	os.RemoveAll(s.dir)
}

// freePort returns a port of the loopback interface that nobody had a moment
// ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
