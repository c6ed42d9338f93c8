package main

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/internal/redistest"
)

// start starts the servers that the contestants need, and creates a meter that reads the counters
// of these servers.
func (b *bench) start(ctx context.Context) {
	needs := map[int]bool{}
	for _, c := range b.contestants {
		needs[c.nodes] = true
	}
	n := 1
	if needs[5] {
		n += 5
	}
	for range n {
		srv := redistest.Start(&b.servers, redistest.Real)
		b.redises = append(b.redises, srv)
		b.meter.redises = append(b.meter.redises, srv.Client())
	}

	b.Redis = field(ctx, b.meter.redises[0], "redis_version")
	at := b.addresses((*redistest.Server).URL)
	if needs[0] {
		b.meter.etcd = etcdtest.Start(&b.servers, 1)[0]
		at.Etcd = b.meter.etcd.Client
	}

	if needs[onPostgres] {
		s := pgtest.Start(&b.servers, "max_connections=1000") // the pools of 64 processes
		at.Postgres = "postgres://postgres@" + s.Addr + "/postgres?sslmode=disable"
	}

	b.at = map[time.Duration]stores{0: at}
}

// addresses returns the addresses of the Redis servers. The function of returns the URL of one.
func (b *bench) addresses(of func(*redistest.Server) string) (at stores) {
	at.One = of(b.redises[0])
	for _, srv := range b.redises[1:] {
		at.Five = append(at.Five, of(srv))
	}
	return at
}

// storesOf returns the addresses of the stores, or if trip is not 0, the addresses of proxies that
// delay each reply by trip.
func (b *bench) storesOf(trip time.Duration) stores {
	if _, ok := b.at[trip]; !ok {
		b.at[trip] = b.addresses(func(srv *redistest.Server) string {
			p := srv.Proxy()
			p.Delay(trip)
			return "redis://" + p.Addr()
		})
	}

	return b.at[trip]
}
