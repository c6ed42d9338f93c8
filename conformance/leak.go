package conformance

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"
	"strings"
	"time"
)

// labelName is the profiler label that marks the goroutines of a clause.
// A goroutine inherits the labels of the goroutine that starts it. So the leaks of
// one clause can be distinguished from other goroutines of the program.
const labelName = "hasp-conformance"

// stacks returns the stacks of all goroutines with a label.
func stacks(label string) string {
	var all bytes.Buffer
	pprof.Lookup("goroutine").WriteTo(&all, 1)
	mark := fmt.Sprintf("%q:%q", labelName, label)
	var found []string
	for g := range strings.SplitSeq(all.String(), "\n\n") {
		if strings.Contains(g, mark) {
			found = append(found, g)
		}
	}
	return strings.Join(found, "\n\n")
}

// leaves runs f and returns an error if goroutines that f started do not end. It
// gives them time, because a goroutine may signal its end shortly before it ends.
func (e *env) leaves(f func()) error {
	label := fmt.Sprintf("%s leak %d", e.id, e.serial.Add(1))

	done := make(chan error, 1)
	go pprof.Do(e.ctx, pprof.Labels(labelName, label), func(context.Context) {
		done <- e.try(func() {
			if stacks(label) == "" { // this goroutine's own
				must(&skipError{"the profiles of this Go release do not contain labels"})
			}
			f()
		})
	})

	if err := <-done; err != nil {
		return err
	}
	began, left := time.Now(), ""

	for pause := time.Millisecond; ; pause *= 2 {
		if left = stacks(label); left == "" {
			return nil
		}
		if time.Since(began) > e.patience {
			return fmt.Errorf("goroutines left behind:\n%s", left)
		}
		e.sleep(pause)
	}
}
