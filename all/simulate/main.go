// Command simulate runs Clients of etcdlock, an etcd in memory and the network between them
// in virtual time. It checks what github.com/hasplock/hasp/internal/simulate checks, and has
// its flags. From the directory all:
//
//	go run ./simulate -seeds 10000
//	go run ./simulate -from 17 -seeds 1
package main

import "github.com/hasplock/hasp/internal/simulate/world"

func main() { world.Main(kinds...) }
