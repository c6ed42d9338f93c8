package hasp_test

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// trap is a context whose methods call spring.
type trap struct {
	context.Context
	spring func(method string)
}

func (c trap) Done() <-chan struct{} { c.spring("Done"); return c.Context.Done() }

func (c trap) Err() error { c.spring("Err"); return c.Context.Err() }

// If code of the caller panics or ends the goroutine during Lock, Lock leaves nothing behind.
func TestLockThatDoesNotReturn(t *testing.T) {
	slots := hasp.WithSlots(1)
	for _, tc := range []struct {
		where string
		taken bool // another Client holds the key
		first bool // another caller of this Client is the head of the line
		kept  bool // the call has a min hold
		opts  []hasp.Option
	}{
		{where: "requested"},
		{where: "acquired"},
		{where: "acquired", opts: []hasp.Option{hasp.WithShared()}},
		{where: "acquired", kept: true},
		{where: "acquired", opts: []hasp.Option{slots}},
		{where: "acquired", first: true},
		{where: "Backoff", taken: true},
		{where: "Backoff", taken: true, opts: []hasp.Option{hasp.WithShared()}},
		{where: "Err", taken: true},
		{where: "Done", taken: true},
		{where: "Done", taken: true, first: true},
		{where: "Done", taken: true, opts: []hasp.Option{slots}},
		{where: "Err", taken: true, opts: []hasp.Option{slots}},
		{where: "Backoff", taken: true, first: true, opts: []hasp.Option{slots}},
	} {
		for _, ordered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%+v ordered=%t", tc, ordered), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var armed atomic.Bool
					how := func() { panic("the caller's") }
					spring := func(where string) {
						if where == tc.where && armed.Swap(false) {
							how()
						}
					}

					store, f := new(memlock.Store), newFaulty()
					f.Driver = store.Driver().(Driver)
					var d backend.Driver = f
					if ordered {
						d = store.Driver()
					}
					c := await.Value(hasp.New(d, &hasp.Options{
						Observe: func(_ context.Context, e hasp.Event) { spring(string(e.Kind)) },
						Backoff: func(int) time.Duration { spring("Backoff"); return time.Second },
					}))
					defer c.Close()
					other := await.Value(hasp.New(store.Driver(), nil))
					defer other.Close()

					for range 2 {
						var before *hasp.Lease
						if tc.taken {
							before = lockNow(t, other, "k", tc.opts...)
						}
						ahead := make(chan *hasp.Lease, 1)
						if tc.first {
							go func() { ahead <- lockNow(t, c, "k", tc.opts...) }()
							synctest.Wait()
						}

						ended := make(chan struct{})
						go func() {
							defer close(ended)
							defer func() { recover() }()
							if tc.where != "Err" {
								armed.Store(true)
							} else {
								time.AfterFunc(time.Second, func() { armed.Store(true) }) // not the first Err, because Lock calls it before it has acquired anything
							}
							opts := tc.opts
							if tc.kept {
								opts = []hasp.Option{hasp.WithMinHold(time.Hour)}
							}
							if l, err := c.Lock(trap{t.Context(), spring}, "k", opts...); err == nil {
								unlock(t, l) // with this driver, the code that panics was not called
							}
						}()
						time.Sleep(5 * time.Second)
						if before != nil {
							unlock(t, before)
						}
						if tc.first {
							unlock(t, <-ahead)
						}
						<-ended
						armed.Store(false)

						// The key is free. No line has a head that has gone, or a caller that takes
						// no ticket.
						start := time.Now()
						unlock(t, lockNow(t, c, "k", tc.opts...))
						unlock(t, lockNow(t, other, "k", tc.opts...))
						within(t, "the next Lock", start, 2*time.Second)
						synctest.Wait()
						nothingLeft(t, c)
						how = runtime.Goexit // in the second round
					}
				})
			})
		}
	}
}

func TestErrorOfAContextThatCannotBeCompared(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		l := lockNow(t, c, "k")
		ctx := timeout(t, t.Context(), time.Second)
		want(t, "Lock", errOf(c.Lock(oddContext{ctx}, "k")), hasp.ErrHeld)
		unlock(t, l)
	})
}

// oddContext ends with an error that is a slice.
type oddContext struct{ context.Context }

type oddError []string

func (oddError) Error() string { return "odd" }

func (c oddContext) Err() error {
	if c.Context.Err() != nil {
		return oddError{}
	}
	return nil
}
