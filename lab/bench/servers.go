package main

import (
	"time"

	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// start starts the servers that the contestants need, and a meter of them.
// close ends them.
func (b *bench) start() error {
	needs := map[int]bool{1: true}
	for _, c := range b.all {
		needs[c.nodes] = true
	}
	n := 1
	if needs[3] || needs[5] {
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

// storesOf returns where a contestant finds its stores if each round trip takes
// longer by trip.
func (b *bench) storesOf(c contestant, trip time.Duration) stores {
	at, ok := b.far[trip]
	if !ok {
		at = b.at
		if trip > 0 {
			at, _ = b.behindProxies(trip)
		}
		b.far[trip] = at
	}
	if c.nodes == 3 {
		at.Five = at.Five[:3]
	}
	return at
}

// behindProxies returns the Redis servers with a proxy before each of them, which
// delays replies, and the proxies of the five masters.
func (b *bench) behindProxies(delay time.Duration) (at stores, five []*faultproxy.Proxy) {
	for i, srv := range b.redises {
		p := srv.Proxy()
		p.Delay(delay)
		if url := "redis://" + p.Addr(); i == 0 {
			at.One = url
		} else {
			at.Five, five = append(at.Five, url), append(five, p)
		}
	}
	return at, five
}
