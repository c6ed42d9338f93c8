package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// startRedis starts a redis-server of its own, which stop kills.
func startRedis(ctx context.Context) (url string, stop func(), err error) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return "", nil, fmt.Errorf("%w; name one that runs with --redis", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	addr := l.Addr().(*net.TCPAddr)
	l.Close()
	dir, err := os.MkdirTemp("", "handover-")
	if err != nil {
		return "", nil, err
	}
	cmd := exec.Command("redis-server", "--bind", "127.0.0.1", "--port", strconv.Itoa(addr.Port), "--save", "", "--dir", dir)
	if err := cmd.Start(); err != nil {
		os.RemoveAll(dir)
		return "", nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		os.RemoveAll(dir)
	}
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("tcp", addr.String())
		if err == nil {
			conn.Close()
			return "redis://" + addr.String(), stop, nil
		}
		if ctx.Err() != nil || time.Since(began) > patience {
			stop()
			return "", nil, errors.Join(errors.New("redis-server does not answer"), err)
		}
	}
}

// connect returns a client of the store that sends nothing of its own accord.
func connect(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, errors.New("--redis: want redis://user:password@host:port/db")
	}
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(o), nil
}

// calls is how many commands a server has carried out so far: scripts, and all
// others, those inside scripts included.
type calls struct{ scripts, others int64 }

// count asks the server. One that keeps no count has done nothing.
func count(ctx context.Context, rdb *redis.Client) (c calls, err error) {
	info, err := rdb.Info(ctx, "commandstats").Result()
	if _, ok := err.(redis.Error); ok {
		return c, nil
	}
	if err != nil {
		return c, err
	}
	for line := range strings.Lines(info) {
		name, stats, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		number, _, _ := strings.Cut(stats, ",")
		n, err := strconv.ParseInt(number, 10, 64)
		switch {
		case !ok || err != nil || name == "info":
		case strings.HasPrefix(name, "eval") || name == "fcall":
			c.scripts += n
		default:
			c.others += n
		}
	}
	return c, nil
}
