package calls

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
)

type key struct{}

// Each end is visible by Err alone, by Done, and in a derived context. Done and the derived context
// may be asked for before or after the end.
func TestEnds(t *testing.T) {
	cause := errors.New("cause")
	var quit context.CancelFunc
	for name, test := range map[string]struct {
		end  func(c *Context, cancel context.CancelCauseFunc)
		want error
	}{
		"by deadline":   {func(*Context, context.CancelCauseFunc) { time.Sleep(time.Second) }, context.DeadlineExceeded},
		"by its parent": {func(_ *Context, cancel context.CancelCauseFunc) { cancel(cause) }, context.Canceled},
		"by quit":       {func(*Context, context.CancelCauseFunc) { quit() }, context.Canceled},
		"by End":        {func(c *Context, _ context.CancelCauseFunc) { c.End() }, context.Canceled},
		"seen twice": {func(c *Context, _ context.CancelCauseFunc) {
			time.Sleep(time.Second)
			synctest.Wait()
			_ = c.Err()
			c.End()
		}, context.DeadlineExceeded},
	} {
		for _, early := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					parent, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, "v"))
					defer cancel(nil)
					quits, cancelQuits := context.WithCancel(context.Background())
					defer cancelQuits()
					quit = cancelQuits
					c := WithTimeout(parent, quits, time.Second)
					defer c.End()
					var child context.Context
					derive := func() {
						var stop context.CancelFunc
						child, stop = context.WithCancel(c)
						t.Cleanup(stop)
					}
					if early {
						derive()
						select {
						case <-c.Done():
							t.Error("Done")
						default:
						}
					}
					if err := c.Err(); err != nil {
						t.Errorf("before the end: %v", err)
					}
					test.end(c, cancel)
					synctest.Wait() // until timers have fired
					if err := c.Err(); err != test.want {
						t.Errorf("Err: %v, want %v", err, test.want)
					}
					<-c.Done()
					if !early {
						derive()
					}
					<-child.Done()
					if err := child.Err(); err != test.want {
						t.Errorf("of a child: %v, want %v", err, test.want)
					}
					if err := c.Err(); err != test.want {
						t.Errorf("Err again: %v, want %v", err, test.want)
					}
					if name == "by its parent" && context.Cause(c) != cause {
						t.Errorf("cause: %v", context.Cause(c))
					}
					if v := c.Value(key{}); v != "v" {
						t.Errorf("value: %v", v)
					}
				})
			})
		}
	}
}

func TestSplit(t *testing.T) {
	none := context.Background()
	parent, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	first, _ := parent.Deadline()
	q, cancelQuit := context.WithCancel(t.Context())
	defer cancelQuit()
	lone, with, late := WithTimeout(t.Context(), nil, time.Hour), WithTimeout(t.Context(), q, time.Hour), WithTimeout(parent, nil, time.Hour)
	child := context.WithValue(late, key{}, 1)
	for _, c := range []struct {
		ctx, parent, quit context.Context
		deadline          time.Time
	}{
		{lone, t.Context(), none, lone.deadline}, {with, t.Context(), q, with.deadline}, {late, parent, none, first},
		{child, child, none, first}, {none, none, none, time.Time{}},
	} {
		if at, ok := c.ctx.Deadline(); at != c.deadline || ok == at.IsZero() {
			t.Errorf("%v: the deadline is %v, %v", c.ctx, at, ok)
		}
		if parent, quit, deadline := Split(c.ctx); parent != c.parent || quit != c.quit || deadline != c.deadline {
			t.Errorf("%v: got %v, %v, %v", c.ctx, parent, quit, deadline)
		}
	}
}

// The store's answer counts, although the context has ended.
func TestAnswerAfterTheEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Direct(&Caller{}, ctx, nil, time.Second, func(context.Context) (int, error) {
		return 0, backend.ErrHeld
	}); err != backend.ErrHeld {
		t.Error(err)
	}
}

// Without Done there is one allocation, and no timer.
func TestIsCheap(t *testing.T) {
	parent := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		c := WithTimeout(parent, nil, time.Hour)
		if c.Err() != nil {
			t.Error(c.Err())
		}
		c.End()
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

// The parent's deadline ends the context only after it has ended the parent.
func TestParentEndsFirst(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			parent, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			c := WithTimeout(parent, nil, time.Minute)
			defer c.End()
			<-c.Done()
			if parent.Err() == nil {
				t.Error("the parent has not ended")
			}
		})
	}
}
