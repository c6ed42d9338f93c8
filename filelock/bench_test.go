package filelock

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

func benchClaim(key string) backend.Claim {
	return backend.Claim{Key: key, Token: "token-" + key, Owner: "host/1/bench", TTL: time.Minute, Timeout: 3 * time.Second}
}

func BenchmarkAcquireRelease(b *testing.B) {
	for name, fenced := range map[string]bool{"unfenced": false, "fenced": true} {
		b.Run(name, func(b *testing.B) {
			d := New(b.TempDir(), nil)
			c := benchClaim("key")
			c.Fenced = fenced
			b.ReportAllocs()
			for b.Loop() {
				if _, err := d.Acquire(b.Context(), c); err != nil {
					b.Fatal(err)
				}
				if err := d.Release(b.Context(), c); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkHeld measures one attempt at a held key.
func BenchmarkHeld(b *testing.B) {
	d := New(b.TempDir(), nil)
	c := benchClaim("key")
	if _, err := d.Acquire(b.Context(), c); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Acquire(b.Context(), c); !errors.Is(err, backend.ErrHeld) {
			b.Fatal(err)
		}
	}
}

func BenchmarkRenewBatch(b *testing.B) {
	const n = 100
	d := New(b.TempDir(), nil)
	var cs []backend.Claim
	for i := range n {
		c := benchClaim("key" + strconv.Itoa(i))
		if _, err := d.Acquire(b.Context(), c); err != nil {
			b.Fatal(err)
		}
		cs = append(cs, c)
	}
	for b.Loop() {
		for i := range cs {
			cs[i].TTL += time.Millisecond // so that each record has to be written
		}
		d.Renew(b.Context(), cs, func(_ int, _ backend.Grant, err error) {
			if err != nil {
				b.Error(err)
			}
		})
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/n, "µs/lease")
}
