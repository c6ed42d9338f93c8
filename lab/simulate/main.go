// Command simulate runs Clients, a store and the network between them in virtual
// time: an in-memory driver, virtual Redis servers, or an etcd in memory. It runs callers and faults, and checks what callers observe: an exclusive holder is alone, fences grow,
// calls return in time, nothing is left behind, and events add up. Lead, DoAll and
// WithoutReentry do what their comments say.
// In the directory lab:
//
//	go run ./simulate -seeds 100000
//	go run ./simulate -kind redlock3 -from 17 -seeds 1
//	go run ./simulate -kind fairlock -seeds 1000000 -time 10m
//
// A seed decides what every caller and every fault does. Goroutines that are ready
// at the same instant run in the order that the scheduler chooses. So a seed that
// fails may have to be run several times.
package main

import "github.com/hasplock/hasp/lab/simulate/world"

func main() { world.Main(kinds...) }
