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

	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// view shows a demo while it runs.
type view interface {
	draw(t *timeline)                                     // the present
	note(at time.Duration, text string)                   // an event that deserves a line
	wrote(t *timeline, lane int, at time.Duration, n int) // an increment
	close()
}

// view returns a screen if out is a terminal that can show it, and lines
// otherwise. The lines call unread if out cannot be written to.
func (d *Demo) view(out io.Writer, unread func(error)) view {
	if out == nil {
		return &lines{out: io.Discard, d: d, unread: unread}
	}
	if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" && runtime.GOOS != "windows" {
		size := func() (width, height int) {
			width, height, _ = term.GetSize(int(f.Fd()))
			return width, height
		}
		if width, height := size(); width >= minWidth && height > d.Workers+aroundLanes {
			return newScreen(out, d, func() int { w, _ := size(); return w })
		}
	}
	fmt.Fprintf(out, "%s, one number in a file, %s\n", text.Count(d.Workers, "process", "processes"), d.place)
	return &lines{out: out, d: d, unread: unread}
}

// lines shows a line for each increment.
type lines struct {
	out    io.Writer
	d      *Demo
	unread func(error)
}

func (*lines) draw(*timeline) {}
func (*lines) close()         {}

func (v *lines) note(at time.Duration, text string) {
	if _, err := fmt.Fprintf(v.out, "%8.3fs  %s\n", at.Seconds(), text); err != nil {
		v.unread(err)
	}
}

func (v *lines) wrote(t *timeline, i int, at time.Duration, n int) {
	line := fmt.Sprintf("worker %d writes %d of %d", i+1, n, v.d.expected())
	if s := t.lanes[i].at(at); s.state == holding && !v.d.NoLock {
		line += ", holding for " + text.Duration(at-s.from)
		if w := t.lanes[i].at(s.from - 1); w.state == waiting {
			line += " after waiting " + text.Duration(w.to-w.from)
		}
	}
	if waiters := t.inLine(at); len(waiters) > 0 && v.d.ordered {
		line += "; in line: " + workers(waiters)
	} else if len(waiters) > 0 {
		line += "; waiting: " + workers(t.in(waiting, at))
	}
	if writers := t.in(holding, at); v.d.NoLock && len(writers) > 1 {
		line += "; writing at the same time: " + workers(writers)
	}
	v.note(at, line)
}

// workers names the workers of lanes: their numbers, from 1.
func workers(lanes []int) string {
	var names []string
	for _, i := range lanes {
		names = append(names, strconv.Itoa(i+1))
	}
	return strings.Join(names, ", ")
}
