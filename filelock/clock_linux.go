package filelock

import "github.com/hasplock/hasp/internal/clock"

func bootClock() instant {
	boot, up := clock.SinceBoot()
	if boot == "" {
		return instant{}
	}
	return instant{boot: boot, up: up}
}
