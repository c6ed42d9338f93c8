package from

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

var must = await.Must

// check runs the code before and after a migration. shares says whether both exclude the callers
// of locks.
func check(t *testing.T, locks *hasp.Client, shares bool, codes ...func(context.Context, work) error) {
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
	return redistest.Start(t, &redistest.Options{Own: true}).Client()
}

func TestRedsync(t *testing.T) {
	masters := redistest.StartNodes(t, 3, nil).Clients()
	var pools []redsyncredis.Pool
	for _, rdb := range masters {
		pools = append(pools, goredis.NewPool(rdb))
	}
	rs := redsync.New(pools...)
	check(t, await.Value(redlock.New(masters, nil)), true,
		func(ctx context.Context, do work) error { return redsyncBefore(ctx, rs, do) },
		func(ctx context.Context, do work) error { return redsyncAfter(ctx, masters, do) })
}

func TestRedislock(t *testing.T) {
	rdb := server(t)
	check(t, await.Value(spinlock.New(rdb, nil)), true,
		func(ctx context.Context, do work) error { return redislockBefore(ctx, rdb, do) },
		func(ctx context.Context, do work) error { return redislockAfter(ctx, rdb, do) })
}

func TestRueidislock(t *testing.T) {
	rdb := redistest.Start(t, &redistest.Options{Own: true, Real: true}).Client()
	locker := await.Value(rueidislock.NewLocker(rueidislock.LockerOption{
		KeyMajority: 1, ClientOption: rueidis.ClientOption{InitAddress: []string{rdb.Options().Addr}},
	}))
	defer locker.Close()
	locks := await.Value(spinlock.New(rdb, &spinlock.Options{Client: hasp.Options{Prefix: "rueidislock:0:"}}))
	check(t, locks, true,
		func(ctx context.Context, do work) error { return rueidislockBefore(ctx, locker, do) },
		func(ctx context.Context, do work) error { return rueidislockAfter(ctx, locks, do) })
}

func TestEtcd(t *testing.T) {
	addr := etcdtest.Start(t, 1)[0].Client
	client := await.Value(clientv3.New(clientv3.Config{Endpoints: []string{addr}, Logger: zap.NewNop()}))
	defer client.Close()
	locks := await.Value(hasp.Open(t.Context(), "etcdlock+etcd://"+addr, nil))
	check(t, locks, false, func(ctx context.Context, do work) error { return etcdBefore(ctx, client, do) })
	check(t, locks, true, func(ctx context.Context, do work) error { return etcdAfter(ctx, locks, do) })
}

func TestJava(t *testing.T) {
	rdb := server(t)
	redisson := await.Value(pubsublock.New(rdb, nil))
	check(t, redisson, true, func(ctx context.Context, do work) error { return redissonAfter(ctx, redisson, do) })
	spring := await.Value(spinlock.New(rdb, &spinlock.Options{Client: hasp.Options{Prefix: "registry:"}}))
	check(t, spring, true, func(ctx context.Context, do work) error { return springAfter(ctx, spring, do) })

	// The min hold keeps the key after the job.
	jobs := await.Value(spinlock.New(rdb, &spinlock.Options{Client: hasp.Options{Prefix: "jobs:", TTL: time.Minute}}))
	shed := func(ctx context.Context, do work) error { return shedlockAfter(ctx, jobs, do) }
	check(t, jobs, true, shed)
}
