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
	own := strconv.Itoa(os.Getpid())
	stores := b.meter.pids(ctx, c)
	bind := func(processors string, pids ...string) {
		for _, pid := range pids {
			if err := exec.Command("taskset", "-a", "-p", "-c", processors,
				pid).Run(); err != nil && b.Pinned {
				b.Pinned = false
				b.note("one goroutine is not pinned: taskset: %v", err)
			}
		}
	}

	if b.Pinned {
		bind("1", stores...)
		bind("0", own)
		// otherwise the runtime would notice the binding in the middle of a turn
		runtime.GOMAXPROCS(1)
	}

	return func() {
		bind(fmt.Sprint("0-", runtime.NumCPU()-1), append(stores, own)...)
		runtime.SetDefaultGOMAXPROCS()
	}
}
