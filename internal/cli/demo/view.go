package demo

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/hasplock/hasp/internal/cli/text"
)

// view shows a demo while it runs. An error means that no process reads it any more.
type view interface {
	draw(t *timeline)                                           // the present
	note(at time.Duration, text string) error                   // an event that deserves a line
	wrote(t *timeline, lane int, at time.Duration, n int) error // an increment
	close(t *timeline)
}

// view returns a screen if out is a terminal that can show it, and lines
// otherwise.
func (d *Demo) view(out io.Writer) view {
	if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" && runtime.GOOS != "windows" {
		width, height, _ := term.GetSize(int(f.Fd()))
		if width >= minWidth && height > d.Workers+aroundLanes {
			return newScreen(out, d, func() int { w, _, _ := term.GetSize(int(f.Fd())); return w })
		}
	}

	fmt.Fprintf(out, "%s, one number in a file, %s\n", text.Count(d.Workers, "process", "processes"), d.place)
	return &lines{out: out, d: d}
}

// lines shows a line for each increment.
type lines struct {
	out io.Writer
	d   *Demo
}

func (*lines) draw(*timeline)  {}
func (*lines) close(*timeline) {}

func (v *lines) note(at time.Duration, text string) error {
	if _, err := fmt.Fprintf(v.out, "%8.3fs  %s\n", at.Seconds(), text); err != nil {
		return failure{err, exitUnread}
	}
	return nil
}

func (v *lines) wrote(t *timeline, i int, at time.Duration, n int) error {
	line := fmt.Sprintf("worker %d writes %d of %d", i+1, n, v.d.expected())
	if s := t.Lanes[i].at(at); s.State == holding && !v.d.NoLock {
		line += ", holding for " + text.Duration(at-s.From)
		if w := t.Lanes[i].at(s.From - 1); w.State == waiting {
			line += " after waiting " + text.Duration(w.To-w.From)
		}
	}

	if waiters := t.in(waiting, at); len(waiters) > 0 {
		label := "waiting"
		if v.d.Ordered {
			label = "in line"
		}
		line += "; " + label + ": " + workers(waiters)
	}
	if writers := t.in(holding, at); v.d.NoLock && len(writers) > 1 {
		line += "; writing at the same time: " + workers(writers)
	}
	return v.note(at, line)
}

// workers names the workers of lanes: their numbers, from 1.
func workers(lanes []int) string {
	var names []string
	for _, i := range lanes {
		names = append(names, strconv.Itoa(i+1))
	}
	return strings.Join(names, ", ")
}
