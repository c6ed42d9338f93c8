package redisstore

import "time"

// Outage returns err, whose outcome is unknown, with the time since when the store
// has not answered. Package hasp gets the time by a method Since of a Waiter's error.
func Outage(err error, since time.Time) error { return &outage{err, since} }

type outage struct {
	error
	since time.Time
}

func (o *outage) Unwrap() error    { return o.error }
func (o *outage) Since() time.Time { return o.since }
