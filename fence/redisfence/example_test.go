package redisfence_test

import (
	"context"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence/redisfence"
)

func ExampleDo() {
	var rdb redis.UniversalClient
	var locks hasp.Locker // of any strategy
	err := hasp.Do(context.Background(), locks, "account/7", func(ctx context.Context, _ *hasp.Lease) error {
		return redisfence.Do(ctx, rdb, "{account/7}:fence", func(p redis.Pipeliner) error {
			return p.Set(ctx, "{account/7}:balance", 80, 0).Err()
		})
	}, hasp.WithFence())
	if err != nil {
		log.Print(err)
	}
}
