// Package integrations has the code of docs/integrations.md and docs/telemetry.md. Its tests
// run that code, and check that the pages show it.
package integrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/pressly/goose/v3"
	"github.com/robfig/cron/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence"
	"github.com/hasplock/hasp/gocronhasp"
)

func scheduleOnce(c *hasp.Client, report func()) (gocron.Scheduler, error) {
	// The job runs every minute. A run keeps the key for half of that.
	locker := gocronhasp.NewLocker(c, 30*time.Second)
	s, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
	if err != nil {
		return nil, err
	}
	_, err = s.NewJob(
		gocron.CronJob("* * * * *", false),
		gocron.NewTask(report),
		gocron.WithName("report"), // the key
	)
	return s, err
}

func scheduleEvery(c *hasp.Client, period time.Duration, report func()) (gocron.Scheduler, error) {
	// Each process has ticks of its own, so a run keeps the key for nearly the whole period.
	locker := gocronhasp.NewLocker(c, period-period/20)
	s, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
	if err != nil {
		return nil, err
	}
	_, err = s.NewJob(gocron.DurationJob(period), gocron.NewTask(report), gocron.WithName("report"))
	return s, err
}

func scheduleOnLeader(ctx context.Context, c *hasp.Client) (gocron.Scheduler, *gocronhasp.Elector, error) {
	elector := gocronhasp.NewElector(ctx, c, "scheduler")
	s, err := gocron.NewScheduler(gocron.WithDistributedElector(elector))
	if err != nil {
		return nil, nil, errors.Join(err, elector.Close())
	}
	return s, elector, nil // at the end: s.Shutdown, then elector.Close
}

// once returns a wrapper that runs a job on one process per tick. The key stays taken for
// minHold after the start of a run.
func once(l hasp.Locker, key string, minHold time.Duration, logger cron.Logger) cron.JobWrapper {
	return func(j cron.Job) cron.Job {
		return cron.FuncJob(func() {
			err := hasp.Do(context.Background(), l, key, func(context.Context, *hasp.Lease) error {
				j.Run()
				return nil
			}, hasp.WithMaxWait(0), hasp.WithMinHold(minHold))
			if err != nil && !errors.Is(err, hasp.ErrHeld) {
				logger.Error(err, "job", "key", key)
			}
		})
	}
}

// exclusive serves requests under the key of the request, one at a time.
func exclusive(l hasp.Locker, key func(*http.Request) string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served := false
		err := hasp.Do(r.Context(), l, key(r), func(ctx context.Context, _ *hasp.Lease) error {
			served = true
			next.ServeHTTP(w, r.WithContext(ctx)) // ctx ends if the lock is lost
			return nil
		}, hasp.WithMaxWait(200*time.Millisecond))

		switch {
		case served, r.Context().Err() != nil:
			// There is an answer, or the client has gone.
		case errors.Is(err, hasp.ErrHeld):
			http.Error(w, "another request is at work; try again", http.StatusConflict)
		case errors.Is(err, hasp.ErrUnavailable), errors.Is(err, hasp.ErrClosed):
			w.Header().Set("Retry-After", "1")
			http.Error(w, "the lock service does not answer", http.StatusServiceUnavailable)
		default:
			http.Error(w, "the lock failed", http.StatusInternalServerError)
		}
	})
}

// setBalance writes under the lease that ctx belongs to. If a later holder has written, nothing is
// changed, and the error matches hasp.ErrLost.
func setBalance(ctx context.Context, db *sql.DB, id, balance int64) error {
	account := fmt.Sprint("account/", id)
	return fence.SQL{}.Do(ctx, db, account, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = $1 WHERE id = $2`, balance, id)
		return err
	})
}

// migrations is a lock.Locker of goose. Each Provider has one of its own.
type migrations struct {
	l     hasp.Locker
	key   string
	lease *hasp.Lease
}

func (m *migrations) Lock(ctx context.Context, _ *sql.DB) error {
	lease, err := m.l.Lock(ctx, m.key, hasp.WithMaxWait(5*time.Minute))
	if err == nil {
		m.lease = lease
	}
	return err
}

func (m *migrations) Unlock(ctx context.Context, _ *sql.DB) error {
	return m.lease.Unlock(ctx)
}

func migrate(ctx context.Context, c *hasp.Client, db *sql.DB, files fs.FS) ([]*goose.MigrationResult, error) {
	p, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithLocker(&migrations{l: c, key: "migrations"}))
	if err != nil {
		return nil, err
	}
	return p.Up(ctx)
}
