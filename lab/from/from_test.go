// Package from tests the examples of docs/from.md. Each is a package below this one, and runs beside
// the same program with the other library.
package from

import (
	"context"
	"errors"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/redistest"
	fromEtcd "github.com/hasplock/hasp/lab/from/etcd"
	fromRedislock "github.com/hasplock/hasp/lab/from/redislock"
	fromRedisson "github.com/hasplock/hasp/lab/from/redisson"
	fromRedsync "github.com/hasplock/hasp/lab/from/redsync"
	fromRueidislock "github.com/hasplock/hasp/lab/from/rueidislock"
	fromShedlock "github.com/hasplock/hasp/lab/from/shedlock"
	fromSpring "github.com/hasplock/hasp/lab/from/spring"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var must = await.Must

type (
	job  = func(context.Context) error             // what the program does under the lock
	work = func(ctx context.Context, do job) error // the program, which uses the key "report"
)

var goBlock = regexp.MustCompile("(?ms)^```go\n(package from(\\w+)\n.*?)^```$")

// Each block of Go code on the page is a file of a package, which the tests below run.
func TestPageShowsTheCode(t *testing.T) {
	page := string(await.Value(os.ReadFile("../../docs/from.md")))
	blocks := goBlock.FindAllStringSubmatch(page, -1)
	if n := strings.Count(page, "```go"); n != 7 || len(blocks) != n {
		t.Fatalf("the page has %d blocks of Go, and %d of them are files", n, len(blocks))
	}
	for _, b := range blocks {
		name := b[2]
		code := await.Value(os.ReadFile(path.Join(name, name+".go")))
		if b[1] != string(code) {
			t.Errorf("the block is not %s.go:\n%s", name, b[1])
		}
	}
}

// after is the code after a migration: a Report that gets the argument a.
func after[A any](report func(context.Context, A, job) error, a A) work {
	return func(ctx context.Context, do job) error { return report(ctx, a, do) }
}

// check runs the code before and after a migration. shares says whether both exclude the callers
// of locks.
func check(t *testing.T, locks *hasp.Client, shares bool, codes ...work) {
	t.Cleanup(func() { locks.Close() })
	for i, code := range codes {
		ran := 0
		must(t, code(t.Context(), func(ctx context.Context) error {
			ran++
			lease, err := locks.TryLock(context.WithoutCancel(ctx), "report", hasp.WithoutReentry())
			if shares != errors.Is(err, hasp.ErrHeld) {
				t.Errorf("code %d: TryLock of its key: %v, want ErrHeld: %v", i, err, shares)
			}
			if err == nil {
				return lease.Unlock(ctx)
			}
			return nil
		}))
		if ran != 1 {
			t.Errorf("code %d ran its work %d times", i, ran)
		}
	}
}

func server(t *testing.T) *redis.Client {
	return redistest.Start(t, redistest.Own).Client()
}

// prefixed opens spinlock with a prefix.
func prefixed(rdb *redis.Client, prefix string) *hasp.Client {
	return await.Value(spinlock.New(rdb,
		&spinlock.Options{Client: hasp.Options{Prefix: prefix, TTL: time.Minute}}))
}

func TestRedsync(t *testing.T) {
	masters := redistest.StartNodes(t, 3, nil).Clients()
	var pools []redsyncredis.Pool
	for _, rdb := range masters {
		pools = append(pools, goredis.NewPool(rdb))
	}
	before := func(ctx context.Context, do job) error {
		m := redsync.New(pools...).NewMutex("report", redsync.WithExpiry(30*time.Second))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		err := do(ctx) // must end within 30 s, or call m.ExtendContext
		_, uerr := m.UnlockContext(ctx)
		return errors.Join(err, uerr)
	}
	check(t, await.Value(redlock.New(masters, nil)), true,
		before, after(fromRedsync.Report, masters))
}

func TestRedislock(t *testing.T) {
	rdb := server(t)
	before := func(ctx context.Context, do job) error {
		lock, err := redislock.New(rdb).Obtain(ctx, "report", 30*time.Second, nil)
		if err != nil {
			return err
		}
		err = do(ctx) // must end within 30 s, or call lock.Refresh
		return errors.Join(err, lock.Release(ctx))
	}
	check(t, await.Value(spinlock.New(rdb, nil)), true, before, after(fromRedislock.Report, rdb))
}

func TestRueidislock(t *testing.T) {
	rdb := redistest.Start(t, redistest.Real).Client()
	locker := await.Value(rueidislock.NewLocker(rueidislock.LockerOption{
		KeyMajority: 1, ClientOption: rueidis.ClientOption{InitAddress: []string{rdb.Options().Addr}},
	}))
	defer locker.Close()
	before := func(ctx context.Context, do job) error {
		ctx, unlock, err := locker.WithContext(ctx, "report")
		if err != nil {
			return err
		}
		defer unlock()
		return do(ctx)
	}
	check(t, prefixed(rdb, "rueidislock:0:"), true, before, after(fromRueidislock.Report, rdb))
}

func TestEtcd(t *testing.T) {
	addr := etcdtest.Start(t, 1)[0].Client
	config := clientv3.Config{Endpoints: []string{addr}, Logger: zap.NewNop()}
	client := await.Value(clientv3.New(config))
	defer client.Close()
	before := func(ctx context.Context, do job) error {
		session := await.Value(concurrency.NewSession(client))
		defer session.Close()
		m := concurrency.NewMutex(session, "report")
		if err := m.Lock(ctx); err != nil {
			return err
		}
		err := do(ctx) // must also watch session.Done
		return errors.Join(err, m.Unlock(ctx))
	}
	locks := await.Value(hasp.Open(t.Context(), "etcdlock+etcd://"+addr, nil))
	check(t, locks, false, before)
	check(t, locks, true, after(fromEtcd.Report, config))
}

func TestJava(t *testing.T) {
	rdb := server(t)
	check(t, await.Value(pubsublock.New(rdb, nil)), true, after(fromRedisson.Report, rdb))
	check(t, prefixed(rdb, "registry:"), true, after(fromSpring.Report, rdb))

	// The min hold keeps the key after the job.
	jobs := prefixed(rdb, "jobs:")
	check(t, jobs, true, after(fromShedlock.Report, jobs))
}
