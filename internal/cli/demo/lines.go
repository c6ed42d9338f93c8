package demo

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/cli/text"
)

// lines prints a line for each increment.
type lines struct {
	out io.Writer
	d   *Demo
}

// note prints a line. It returns an error if no process reads the output any more.
func (v *lines) note(at time.Duration, text string) error {
	if _, err := fmt.Fprintf(v.out, "%8.3fs  %s\n", at.Seconds(), text); err != nil {
		return failure{err, exitUnread}
	}
	return nil
}

func (v *lines) wrote(t *timeline, i int, at time.Duration, n int) error {
	line := fmt.Sprintf("worker %d writes %d of %d", i+1, n, v.d.expected())
	if l := t.lanes[i]; l.state == holding && !v.d.NoLock {
		line += ", holding for " + text.Duration(at-l.since)
		if l.waited > 0 {
			line += " after waiting " + text.Duration(l.waited)
		}
	}

	if waiters := t.in(waiting); len(waiters) > 0 {
		label := "waiting"
		if v.d.Ordered {
			label = "in line"
		}
		line += "; " + label + ": " + workers(waiters)
	}
	if writers := t.in(holding); v.d.NoLock && len(writers) > 1 {
		line += "; writing at the same time: " + workers(writers)
	}
	return v.note(at, line)
}

// workers returns the numbers of the workers in lanes, from 1.
func workers(lanes []int) string {
	var names []string
	for _, i := range lanes {
		names = append(names, strconv.Itoa(i+1))
	}
	return strings.Join(names, ", ")
}
