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
		if s.etcd, err = startEtcd(filepath.Join(s.dir, "etcd")); err != nil {
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
	port, err := freePort()
	if err != nil {
		return "", err
	}
	cmd := exec.Command("redis-server", "--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--save", "", "--appendonly", "no", "--dir", s.dir)
	endWithParent(cmd)
	if err := cmd.Start(); err != nil {
		return "", err
	}
	s.ends = append(s.ends, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	addr := fmt.Sprint("127.0.0.1:", port)
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			conn.Close()
			return "redis://" + addr, nil
		}
		if ctx.Err() != nil || time.Since(began) > patience {
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
