package main

import (
	"time"

	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/redistest"
)

// start starts the servers that the contestants need, and creates a meter that reads the counters
// of these servers. The method close ends the servers.
func (b *bench) start() error {
	needs := map[int]bool{1: true}
	for _, c := range b.all {
		needs[c.nodes] = true
	}
	n := 1
	if needs[5] {
		n += 5
	}
	return b.servers.Do(func() error {
		b.meter = &meter{}
		for i := range n {
			srv := redistest.Start(&b.servers, &redistest.Options{Own: true, Real: true})
			b.redises = append(b.redises, srv)
			if i == 0 {
				b.at.One, b.meter.one = srv.URL(), srv.Client()
			} else {
				b.at.Five, b.meter.five = append(b.at.Five, srv.URL()), append(b.meter.five, srv.Client())
			}
		}
		if needs[0] {
			b.meter.etcd = etcdtest.Start(&b.servers, 1)[0]
			b.at.Etcd = b.meter.etcd.Client
		}
		return nil
	})
}

// storesOf returns the addresses of the stores, or if trip is not 0, the addresses of proxies that
// delay each reply by trip.
func (b *bench) storesOf(trip time.Duration) stores {
	if trip == 0 {
		return b.at
	}
	at, ok := b.far[trip]
	if ok {
		return at
	}
	for i, srv := range b.redises {
		p := srv.Proxy()
		p.Delay(trip)
		if url := "redis://" + p.Addr(); i == 0 {
			at.One = url
		} else {
			at.Five = append(at.Five, url)
		}
	}
	b.far[trip] = at
	return at
}
