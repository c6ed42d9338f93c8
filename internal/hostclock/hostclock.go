// Package hostclock provides one clock for all processes of a host, so that
// their events can be put in order.
package hostclock
