//go:build !linux

package redistest

import (
	"errors"
	"time"
)

const clocksCanJump = false

func setClock(string, time.Duration) error { return errors.ErrUnsupported }
