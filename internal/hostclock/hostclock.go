// Package hostclock has clocks of a host. Now and SinceBoot return the same time in all processes
// of the host. Suspended returns how long the host has slept. Yield gives a processor of the host
// to other threads.
package hostclock

// Suspended returns how long the host has slept since its boot. It is a variable so that a
// simulation can replace it before the simulation creates a Client.
var Suspended = suspended
