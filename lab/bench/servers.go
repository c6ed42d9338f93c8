package main

import (
	"net"
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
	return b.servers.Do(func() (err error) {
		for range n {
			b.redises = append(b.redises, redistest.Start(&b.servers, &redistest.Options{Own: true, Real: true}))
		}
		b.at.One = b.redises[0].URL()
		for _, srv := range b.redises[1:] {
			b.at.Five = append(b.at.Five, srv.URL())
		}
		if b.meter, err = newMeter(b.at); err == nil && needs[0] {
			b.meter.etcd = etcdtest.Start(&b.servers, 1)[0]
			b.at.Etcd = b.meter.etcd.Client
		}
		return err
	})
}

// storesOf returns where a contestant finds its stores if each round trip takes
// longer by trip.
func (b *bench) storesOf(c contestant, trip time.Duration) (at stores, err error) {
	at, ok := b.far[trip]
	if !ok {
		at = b.at
		if trip > 0 {
			if at, _, err = b.behindProxies(&b.servers, trip); err != nil {
				return at, err
			}
		}
		b.far[trip] = at
	}
	if c.nodes == 3 {
		at.Five = at.Five[:3]
	}
	return at, nil
}

// behindProxies returns the Redis servers with a proxy before each of them, which
// delays replies, and the proxies of the five masters. lab closes the proxies.
func (b *bench) behindProxies(lab *redistest.Lab, delay time.Duration) (at stores, five []*faultproxy.Proxy, err error) {
	for i, srv := range b.redises {
		p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", srv.Addr) })
		if err != nil {
			return at, nil, err
		}
		lab.Cleanup(p.Close)
		p.Delay(delay)
		if url := "redis://" + p.Addr(); i == 0 {
			at.One = url
		} else {
			at.Five, five = append(at.Five, url), append(five, p)
		}
	}
	return at, five, nil
}
