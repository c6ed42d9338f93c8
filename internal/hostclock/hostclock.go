// Package hostclock has two clocks of a host. Now gives all its processes one time, so that their
// events can be put in order. Suspended reports how long the host has slept.
package hostclock

// Suspended returns how long the host has slept since its boot. It is a variable for
// simulations: a Client keeps the function that it finds when it is created.
var Suspended = suspended
