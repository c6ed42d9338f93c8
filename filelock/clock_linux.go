package filelock

import hostclock "github.com/hasplock/hasp/internal/clock"

func bootClock() instant {
	boot, up := hostclock.SinceBoot()
	if boot == "" {
		return instant{}
	}
	return instant{boot: boot, up: up}
}
