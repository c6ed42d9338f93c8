//go:build unix

package spinlock_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// BenchmarkRelease locks and unlocks free keys, a key for each goroutine. The releases of
// one Client use the script, and those of the other the command of the server. The two take
// turns. It needs Redis 8.4 or Valkey 9:
//
//	HASP_TEST_REDIS_SERVER=/path/to/server go test ./spinlock -run '^$' -bench Release -benchtime 15x
//
// It reports medians over the turns: the time of a pair, the CPU time that the server and
// this process spend on it, and in each case how many times as much the script needs.
func BenchmarkRelease(b *testing.B) {
	srv := redistest.Start(b, &redistest.Options{Own: true, Real: true})
	admin := srv.Client()
	command := commandOf(b.Context(), admin)
	if command == "" {
		b.Skipf("needs Redis 8.4 or Valkey 9, in %s", redistest.ServerEnv)
	}
	// A user without the right to the command releases by the script.
	for user, right := range map[string]string{"script": "-" + command, "command": "+" + command} {
		if err := admin.Do(b.Context(), "acl", "setuser", user, "on", ">secret", "~*", "&*", "+@all", right).Err(); err != nil {
			b.Fatal(err)
		}
	}
	users := []string{"script", "command"}
	var clients []*hasp.Client
	for _, user := range users {
		c, err := hasp.Open(b.Context(), "spinlock+redis://"+user+":secret@"+srv.Addr, nil)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
	}

	for _, callers := range []int{1, 64, 256, 1024} {
		b.Run(strconv.Itoa(callers), func(b *testing.B) {
			pair, server, client := make([][]float64, 2), make([][]float64, 2), make([][]float64, 2)
			for b.Loop() {
				for i, c := range clients {
					used, here, began := serverCPU(b, admin), processCPU(b), time.Now()
					n := pairs(b, c, callers)
					pair[i] = append(pair[i], microseconds(time.Since(began))/n)
					client[i] = append(client[i], microseconds(processCPU(b)-here)/n)
					server[i] = append(server[i], microseconds(serverCPU(b, admin)-used)/n)
				}
			}

			b.ReportMetric(0, "ns/op")
			for i, user := range users {
				b.ReportMetric(median(pair[i]), user+"-µs")
				b.ReportMetric(median(server[i]), user+"-server-µs")
				b.ReportMetric(median(client[i]), user+"-client-µs")
			}
			b.ReportMetric(ratio(pair[0], pair[1]), "times")
			b.ReportMetric(ratio(server[0], server[1]), "server-times")
		})
	}
}

// pairs lets callers lock and unlock for a moment, and returns how many pairs they made.
func pairs(b *testing.B, c *hasp.Client, callers int) (n float64) {
	ctx, cancel := context.WithTimeout(b.Context(), 200*time.Millisecond)
	defer cancel()
	counts := make([]int, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for ctx.Err() == nil {
				lease, err := c.Lock(b.Context(), strconv.Itoa(i))
				if err == nil {
					err = lease.Unlock(b.Context())
				}
				if err != nil {
					b.Error(err)
					return
				}
				counts[i]++
			}
		})
	}
	wg.Wait()
	for _, count := range counts {
		n += float64(count)
	}
	return n
}

// serverCPU returns the CPU time that the server has used.
func serverCPU(b *testing.B, rdb *redis.Client) (used time.Duration) {
	for line := range strings.SplitSeq(rdb.Info(b.Context(), "cpu").Val(), "\r\n") {
		name, text, _ := strings.Cut(line, ":")
		if name != "used_cpu_user" && name != "used_cpu_sys" {
			continue
		}
		d, err := time.ParseDuration(text + "s")
		if err != nil {
			b.Fatal(fmt.Errorf("INFO cpu: %w", err))
		}
		used += d
	}
	return used
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// ratio returns the median of the ratios of two values of the same turn.
func ratio(over, under []float64) float64 {
	all := make([]float64, len(over))
	for i := range all {
		all[i] = over[i] / under[i]
	}
	return median(all)
}

func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}
