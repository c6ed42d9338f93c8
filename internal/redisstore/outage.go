package redisstore

import "time"

// Outage is err, of unknown outcome, with the moment since when the store has
// not answered. package hasp asks a Waiter's error for it, by a method Since.
func Outage(err error, since time.Time) error { return &outage{err, since} }

type outage struct {
	error
	since time.Time
}

func (o *outage) Unwrap() error    { return o.error }
func (o *outage) Since() time.Time { return o.since }
