// Package parallel makes several calls at the same time.
package parallel

import "sync"

// Each calls f for each number below n, and at most so many at the same time. It returns after all
// calls.
func Each(n, most int, f func(i int)) {
	slots := make(chan struct{}, most)
	var running sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		running.Go(func() {
			f(i)
			<-slots
		})
	}
	running.Wait()
}
