// Package hostclock is one clock for all processes of a host, so that what
// they did can be put in order.
package hostclock
