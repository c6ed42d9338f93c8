package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/term"
)

// view shows a demo while it runs.
type view interface {
	draw(t *timeline)                                     // the present
	note(at time.Duration, text string)                   // something worth a line
	wrote(t *timeline, lane int, at time.Duration, n int) // an increment
	close()
}

// view chooses how to show d: as a moving picture where there is a terminal
// that can, in lines elsewhere. It calls unread if nobody reads them any more.
func (a *app) view(d *demo, unread func()) view {
	if d.json {
		return silent{}
	}
	if f, ok := a.out.(*os.File); ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" && runtime.GOOS != "windows" {
		size := func() (width, height int) {
			width, height, _ = term.GetSize(int(f.Fd()))
			return width, height
		}
		if width, height := size(); width >= minWidth && height > d.workers+aroundLanes {
			return newScreen(a.out, d, func() int { w, _ := size(); return w })
		}
	}
	fmt.Fprintf(a.out, "%s, one number in a file, %s\n", count(d.workers, "worker process", "worker processes"), d.place)
	return &lines{out: a.out, d: d, unread: unread}
}

// silent shows nothing.
type silent struct{}

func (silent) draw(*timeline)                           {}
func (silent) note(time.Duration, string)               {}
func (silent) wrote(*timeline, int, time.Duration, int) {}
func (silent) close()                                   {}

// lines shows a line for each increment.
type lines struct {
	out    io.Writer
	d      *demo
	unread func()
}

func (*lines) draw(*timeline) {}
func (*lines) close()         {}

func (v *lines) note(at time.Duration, text string) {
	if _, err := fmt.Fprintf(v.out, "%8.3fs  %s\n", at.Seconds(), text); err != nil {
		v.unread()
	}
}

func (v *lines) wrote(t *timeline, i int, at time.Duration, n int) {
	text := fmt.Sprintf("worker %d writes %d of %d", i+1, n, v.d.expected())
	if s := t.lanes[i].at(at); s.state == holding && !v.d.noLock {
		text += ", holding for " + short(at-s.from)
		if w := t.lanes[i].at(s.from - 1); w.state == waiting {
			text += " after waiting " + short(w.to-w.from)
		}
	}
	if who := t.inLine(at); len(who) > 0 && v.d.ordered {
		text += "; in line: " + workers(who)
	} else if len(who) > 0 {
		text += "; waiting: " + workers(t.in(waiting, at))
	}
	if who := t.in(holding, at); len(who) > 1 {
		text += "; writing at the same time: " + workers(who)
	}
	v.note(at, text)
}

// workers names lanes as people count them.
func workers(lanes []int) string {
	var names []string
	for _, i := range lanes {
		names = append(names, strconv.Itoa(i+1))
	}
	return strings.Join(names, ", ")
}
