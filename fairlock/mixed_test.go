package fairlock_test

import (
	"testing"
	"time"
)

// until sleeps until the given time of a quarter of a second of the clock.
func until(phase time.Duration) {
	const period = 250 * time.Millisecond
	now := time.Duration(time.Now().UnixNano()) % period
	time.Sleep((phase - now + period) % period)
}

// When another program has unlocked the key, a waiter finds that soon. After that, a release at the
// end of a quarter of a second leaves the key free until the next one begins.
func TestMixedKey(t *testing.T) {
	inWorld(t, func(w *world) {
		c, ps := w.procs(2)
		want(w.T, "release", ps[0].Release(w.Context(), c), nil)

		until(0)
		w.rdb.Set(w.Context(), "k", "of another program", 0)
		first := ps[1].wait()
		until(80 * time.Millisecond)
		w.rdb.Del(w.Context(), "k")
		until(100 * time.Millisecond)
		select {
		case <-first.done:
			want(w.T, "wait", first.err, nil)
		default:
			w.Fatal("the waiter has not found that the key is free")
		}

		second := ps[0].wait()
		until(180 * time.Millisecond)
		want(w.T, "release", ps[1].Release(w.Context(), first.c), nil)
		until(249 * time.Millisecond)
		if n := w.rdb.Exists(w.Context(), "k").Val(); n != 0 {
			w.Error("the key was handed over, so that no other program finds it free")
		}
		until(30 * time.Millisecond)
		select {
		case <-second.done:
			want(w.T, "wait", second.err, nil)
		default:
			w.Error("the next waiter does not have the key")
		}
	})
}
