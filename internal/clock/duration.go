package clock

import (
	"strconv"
	"time"
)

// ParseDuration parses a duration such as 1m30s. A plain number is a number of seconds.
func ParseDuration(text string) (time.Duration, error) {
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		text += "s"
	}
	return time.ParseDuration(text)
}
