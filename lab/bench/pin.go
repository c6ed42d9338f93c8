package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
)

// pin binds this process to the first processor and the stores of a contestant to the second, until
// unpin is called. Otherwise the time of a lone pair would depend on the processors that the system
// chooses. This time is three times as long if an idle processor must wake up for each message.
func (b *bench) pin(ctx context.Context, c contestant) (unpin func()) {
	pids := b.meter.pids(ctx, c)
	bind := func(own, stores string) {
		for i, pid := range append(pids, strconv.Itoa(os.Getpid())) {
			processors := stores
			if i == len(pids) {
				processors = own
			}
			if err := exec.Command("taskset", "-a", "-p", "-c", processors, pid).Run(); err != nil && b.results.Pinned {
				b.results.Pinned = false
				b.results.note("one goroutine is not pinned: taskset: %v", err)
			}
		}
	}
	if b.results.Pinned {
		bind("0", "1")
		runtime.GOMAXPROCS(1) // otherwise the runtime would notice the binding in the middle of a turn
	}
	return func() {
		all := fmt.Sprint("0-", runtime.NumCPU()-1)
		bind(all, all)
		runtime.SetDefaultGOMAXPROCS()
	}
}
