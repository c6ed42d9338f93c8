// Package hostclock has two clocks of a host. Now is the same time for all processes of the host,
// so that their events can be put in order. Suspended reports how long the host has slept.
package hostclock

// Suspended returns how long the host has slept since its boot. Simulations replace this variable.
// A Client keeps the function that it finds when it is created.
var Suspended = suspended
