package gocronhasp_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/gocronhasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

var must = await.Must

// open returns a new Client, as another process would have. A loss fails the test.
func open(t *testing.T, s *memlock.Store) *hasp.Client {
	t.Helper()
	c := await.Value(hasp.New(s.Driver(), &hasp.Options{Observe: func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventLost {
			t.Errorf("a lease was lost: %+v", e)
		}
	}}))
	t.Cleanup(func() { c.Close() })
	return c
}

func start(t *testing.T, d gocron.JobDefinition, task any, o gocron.SchedulerOption) (gocron.Scheduler, gocron.Job) {
	t.Helper()
	s := await.Value(gocron.NewScheduler(o))
	j := await.Value(s.NewJob(d, gocron.NewTask(task), gocron.WithName("report")))
	s.Start()
	t.Cleanup(func() { s.Shutdown() })
	return s, j
}

// late is the Locker of a scheduler whose clock is behind.
type late struct{ gocron.Locker }

func (l late) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	time.Sleep(200 * time.Millisecond)
	return l.Locker.Lock(ctx, key)
}

// The job is short, and the clocks differ by 200 ms. So the second scheduler would find the key
// free if it did not stay taken after the run.
func TestShortJobRunsOncePerTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(memlock.Store)
		var runs atomic.Int64
		job := func() { time.Sleep(time.Millisecond); runs.Add(1) }
		l := func() gocron.Locker { return gocronhasp.NewLocker(open(t, s), 600*time.Millisecond) }
		start(t, gocron.CronJob("* * * * * *", true), job, gocron.WithDistributedLocker(l()))
		start(t, gocron.CronJob("* * * * * *", true), job, gocron.WithDistributedLocker(late{l()}))
		time.Sleep(500 * time.Millisecond) // to the middle between two ticks
		for tick := range int64(20) {
			if n := runs.Load(); n != tick {
				t.Fatalf("%d runs in %d ticks", n, tick)
			}
			time.Sleep(time.Second)
		}
	})
}

// gocron passes a context that ends when the job is removed or the scheduler shuts down, although
// the job still runs. The test is not in virtual time, because Shutdown spins.
func TestEndOfTheJobsContextDoesNotEndTheHold(t *testing.T) {
	for name, end := range map[string]func(gocron.Scheduler, gocron.Job) error{
		"RemoveJob": func(s gocron.Scheduler, j gocron.Job) error { return s.RemoveJob(j.ID()) },
		"Shutdown":  func(s gocron.Scheduler, _ gocron.Job) error { return s.Shutdown() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const term = time.Second
			store := new(memlock.Store)
			began, ended, finish := make(chan struct{}), make(chan struct{}), make(chan struct{})
			l := gocronhasp.NewLocker(open(t, store), 0, hasp.WithTTL(term))
			s, j := start(t, gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()), func(ctx context.Context) {
				close(began)
				<-ctx.Done()
				close(ended)
				<-finish
			}, gocron.WithDistributedLocker(l))
			await.Return(t, "the start of the job", func() { <-began })

			stopped := make(chan error, 1)
			go func() { stopped <- end(s, j) }()
			await.Return(t, "the end of the context", func() { <-ended })
			other := open(t, store)
			for end := time.Now().Add(3 * term); time.Now().Before(end); time.Sleep(term / 10) {
				if _, err := other.TryLock(t.Context(), "report"); !errors.Is(err, hasp.ErrHeld) {
					t.Fatalf("while the job runs, TryLock returned %v", err)
				}
			}

			close(finish)
			must(t, <-stopped)
		})
	}
}

func TestLockerReturnsErrors(t *testing.T) {
	c := open(t, new(memlock.Store))
	l := gocronhasp.NewLocker(c, 0)
	held := await.Value(l.Lock(t.Context(), "a"))
	if lock, err := l.Lock(t.Context(), "a"); lock != nil || !errors.Is(err, hasp.ErrHeld) {
		t.Errorf("a held key: got %v, %v", lock, err)
	}
	must(t, held.Unlock(t.Context()))

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if lock, err := l.Lock(ended, "a"); lock != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("an ended context: got %v, %v", lock, err)
	}
	if _, err := gocronhasp.NewLocker(c, -1).Lock(t.Context(), "a"); !errors.Is(err, hasp.ErrInvalid) {
		t.Errorf("a negative min hold: got %v", err)
	}
}

func TestOnlyTheLeaderRunsJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		var runs [2]atomic.Int64
		var electors [2]*gocronhasp.Elector
		var schedulers [2]gocron.Scheduler
		for i := range electors { // the first Elector leads
			electors[i] = gocronhasp.NewElector(t.Context(), open(t, store), "leader")
			t.Cleanup(func() { electors[i].Close() })
			schedulers[i], _ = start(t, gocron.DurationJob(20*time.Millisecond), func() { runs[i].Add(1) }, gocron.WithDistributedElector(electors[i]))
			synctest.Wait()
		}

		time.Sleep(time.Second)
		must(t, electors[0].IsLeader(t.Context()))
		if err := electors[1].IsLeader(t.Context()); err != gocronhasp.ErrNotLeader {
			t.Errorf("IsLeader of the other returned %v", err)
		}
		if one, two := runs[0].Load(), runs[1].Load(); one < 45 || two != 0 {
			t.Errorf("the leader ran %d jobs in a second, and the other %d", one, two)
		}

		must(t, schedulers[0].Shutdown())
		must(t, electors[0].Close())
		if err := electors[0].IsLeader(t.Context()); err != gocronhasp.ErrNotLeader {
			t.Errorf("IsLeader after Close returned %v", err)
		}
		time.Sleep(time.Second)
		must(t, electors[1].IsLeader(t.Context()))
		if runs[1].Load() == 0 {
			t.Error("the next leader runs no jobs")
		}
		must(t, electors[0].Close()) // a second Close
	})
}

func TestElectorReturnsErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := await.Value(memlock.New(nil)) // its last Elector loses its lease
		e := gocronhasp.NewElector(t.Context(), c, "leader", hasp.WithMaxWait(0))
		err := e.Close()
		if !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("Close of an invalid Elector returned %v", err)
		}
		if err := e.IsLeader(t.Context()); !errors.Is(err, hasp.ErrInvalid) || !errors.Is(err, gocronhasp.ErrNotLeader) {
			t.Errorf("IsLeader of an invalid Elector returned %v", err)
		}

		ctx, cancel := context.WithCancel(t.Context())
		e = gocronhasp.NewElector(ctx, c, "leader")
		synctest.Wait()
		must(t, e.IsLeader(ctx))
		cancel()
		synctest.Wait()
		if err := e.IsLeader(ctx); err != gocronhasp.ErrNotLeader {
			t.Errorf("IsLeader after the end of the context returned %v", err)
		}
		must(t, e.Close())

		e = gocronhasp.NewElector(t.Context(), c, "leader")
		synctest.Wait()
		must(t, e.IsLeader(t.Context()))
		c.Close()
		synctest.Wait()
		for _, err := range []error{e.IsLeader(t.Context()), e.Close()} {
			if !errors.Is(err, hasp.ErrClosed) {
				t.Errorf("after Close of the Client: got %v", err)
			}
		}
	})
}
