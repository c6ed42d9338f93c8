// Package parallel makes several calls at the same time.
package parallel

import "sync"

// Each calls f for each number below n. It makes up to most calls at the same time, and returns when
// all of them have returned.
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
