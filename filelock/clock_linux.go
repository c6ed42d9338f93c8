package filelock

import "github.com/hasplock/hasp/internal/hostclock"

func bootClock() instant {
	boot, up := hostclock.SinceBoot()
	if boot == "" {
		return instant{}
	}
	return instant{boot: boot, up: up}
}
