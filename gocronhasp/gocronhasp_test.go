package gocronhasp_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/gocronhasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	_ "github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) {
	os.Exit(redistest.Main(m))
}

var must = await.Must

// store is a Redis with a prefix for the keys of one test.
func store(t *testing.T) string {
	return "spinlock+" + redistest.Start(t, nil).URL() + "?prefix=" + t.Name() + ":"
}

// open returns a Client of its own. A loss fails the test.
func open(t *testing.T, url string) *hasp.Client {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, &hasp.Options{Observe: func(_ context.Context, e hasp.Event) {
		if e.Kind == hasp.EventLost {
			t.Errorf("a lease was lost: %+v", e)
		}
	}})
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// start starts a scheduler with one job.
func start(t *testing.T, d gocron.JobDefinition, task any, o gocron.SchedulerOption, opts ...gocron.JobOption) (gocron.Scheduler, gocron.Job) {
	t.Helper()
	s, err := gocron.NewScheduler(o)
	must(t, err)
	j, err := s.NewJob(d, gocron.NewTask(task), append(opts, gocron.WithName("report"))...)
	must(t, err)
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

// The job is short, and the clocks differ by 200 ms: both schedulers find the key free
// unless it stays taken after the run.
func TestShortJobRunsOncePerTick(t *testing.T) {
	t.Parallel()
	const ticks = 20
	url := store(t)
	var mu sync.Mutex
	runs := map[int64]int{}
	job := func() {
		time.Sleep(time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		runs[time.Now().Unix()]++
	}

	// Both start at the same tick, in the middle between two.
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(1500 * time.Millisecond)))
	first := time.Now().Unix() + 1
	l := func() gocron.Locker { return gocronhasp.NewLocker(open(t, url), 600*time.Millisecond) }
	one, _ := start(t, gocron.CronJob("* * * * * *", true), job, gocron.WithDistributedLocker(l()))
	two, _ := start(t, gocron.CronJob("* * * * * *", true), job, gocron.WithDistributedLocker(late{l()}))
	time.Sleep(ticks*time.Second + 200*time.Millisecond)
	must(t, one.Shutdown())
	must(t, two.Shutdown())

	mu.Lock()
	defer mu.Unlock()
	for tick := first; tick < first+ticks; tick++ {
		if n := runs[tick]; n != 1 {
			t.Errorf("tick %d ran %d times", tick-first, n)
		}
	}
}

const term = time.Second

// gocron passes a context that ends when the job is removed or the scheduler shuts down,
// although the job still runs.
func TestEndOfTheJobsContextDoesNotEndTheHold(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"RemoveJob", "Shutdown"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := store(t)
			began, ended, finish := make(chan struct{}), make(chan struct{}), make(chan struct{})
			l := gocronhasp.NewLocker(open(t, url), 0, hasp.WithTTL(term))
			s, j := start(t, gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()), func(ctx context.Context) {
				close(began)
				<-ctx.Done()
				close(ended)
				<-finish
			}, gocron.WithDistributedLocker(l))
			await.Return(t, "the start of the job", func() { <-began })

			stopped := make(chan error, 1)
			go func() {
				if name == "Shutdown" {
					stopped <- s.Shutdown()
				} else {
					stopped <- s.RemoveJob(j.ID())
				}
			}()
			await.Return(t, "the end of the context", func() { <-ended })

			other := open(t, url)
			for end := time.Now().Add(3 * term); time.Now().Before(end); time.Sleep(term / 10) {
				if _, err := other.TryLock(t.Context(), "report"); !errors.Is(err, hasp.ErrHeld) {
					t.Fatalf("while the job runs, TryLock returned %v", err)
				}
			}

			close(finish)
			must(t, <-stopped)
			lease, err := other.Lock(t.Context(), "report", hasp.WithMaxWait(await.Patience))
			must(t, err)
			must(t, lease.Unlock(t.Context()))
		})
	}
}

func TestLockerReturnsErrors(t *testing.T) {
	t.Parallel()
	c := open(t, store(t))
	l := gocronhasp.NewLocker(c, 0)
	held, err := l.Lock(t.Context(), "a")
	must(t, err)
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
	t.Parallel()
	url := store(t)
	var runs [2]atomic.Int64
	var electors [2]*gocronhasp.Elector
	var schedulers [2]gocron.Scheduler
	for i := range electors {
		electors[i] = gocronhasp.NewElector(t.Context(), open(t, url), "leader")
		t.Cleanup(func() { electors[i].Close() })
		schedulers[i], _ = start(t, gocron.DurationJob(20*time.Millisecond), func() { runs[i].Add(1) }, gocron.WithDistributedElector(electors[i]))
	}

	await.Until(t, "runs", func() bool { return runs[0].Load()+runs[1].Load() >= 50 })
	leader, other := 0, 1
	if electors[1].IsLeader(t.Context()) == nil {
		leader, other = 1, 0
	}
	must(t, electors[leader].IsLeader(t.Context()))
	if err := electors[other].IsLeader(t.Context()); err != gocronhasp.ErrNotLeader {
		t.Errorf("IsLeader of the other returned %v", err)
	}
	if n := runs[other].Load(); n != 0 {
		t.Errorf("the scheduler that does not lead ran %d jobs", n)
	}

	must(t, schedulers[leader].Shutdown())
	must(t, electors[leader].Close())
	if err := electors[leader].IsLeader(t.Context()); err != gocronhasp.ErrNotLeader {
		t.Errorf("IsLeader after Close returned %v", err)
	}
	await.Until(t, "the other leads", func() bool { return runs[other].Load() > 0 })
	must(t, electors[other].IsLeader(t.Context()))
	must(t, electors[leader].Close()) // again
}

func TestElectorReturnsErrors(t *testing.T) {
	t.Parallel()
	c := open(t, store(t))
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
	await.Until(t, "leads", func() bool { return e.IsLeader(ctx) == nil })
	cancel()
	await.Until(t, "resigns", func() bool { return e.IsLeader(ctx) != nil })
	must(t, e.Close())
}

// A Client that is closed ends its Elector, and the key is free for others.
func TestElectorEndsWithItsClient(t *testing.T) {
	t.Parallel()
	url := store(t)
	c, err := hasp.Open(t.Context(), url, &hasp.Options{Timeout: 300 * time.Millisecond})
	must(t, err)
	e := gocronhasp.NewElector(t.Context(), c, "leader")
	await.Until(t, "leads", func() bool { return e.IsLeader(t.Context()) == nil })
	c.Close()
	await.Until(t, "ends", func() bool { return errors.Is(e.IsLeader(t.Context()), hasp.ErrClosed) })
	if err := e.Close(); !errors.Is(err, hasp.ErrClosed) {
		t.Errorf("Close returned %v", err)
	}
}
