package frometcd

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/etcdlock"
)

// Report runs work under a lock.
func Report(ctx context.Context, config clientv3.Config, work func(context.Context) error) error {
	locks, err := etcdlock.New(config, nil)
	if err != nil {
		return err
	}
	defer locks.Close()
	return hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return work(ctx)
	}, hasp.WithTTL(10*time.Second))
}
