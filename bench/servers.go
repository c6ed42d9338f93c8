package main

import (
	"context"
	"net"
	"os"

	"github.com/hasplock/hasp/internal/redistest"
)

// start starts the servers that the contestants need, and a meter of them.
// close ends them.
func (b *bench) start(ctx context.Context) (err error) {
	needs := map[int]bool{1: true}
	for _, c := range b.all {
		needs[c.nodes] = true
	}
	var servers []*redistest.Server
	n := 1
	if needs[5] {
		n += 5
	}
	if err := b.servers.Do(func() error {
		for range n {
			servers = append(servers, redistest.Start(&b.servers, &redistest.Options{Own: true, Real: true}))
		}
		return nil
	}); err != nil {
		return err
	}
	b.at.One, b.five = servers[0].URL(), servers[1:]
	for _, srv := range b.five {
		b.at.Five = append(b.at.Five, srv.URL())
	}
	if b.meter, err = newMeter(b.at); err != nil || !needs[0] {
		return err
	}

	dir, err := os.MkdirTemp("", "hasp-bench-")
	if err != nil {
		return err
	}
	b.servers.Cleanup(func() { os.RemoveAll(dir) })
	if b.meter.etcd, b.at.Etcd, err = startEtcd(ctx, dir); err == nil {
		b.servers.Cleanup(b.meter.etcd.End)
	}
	return err
}

// freePort returns a port of the loopback interface that was free just now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
