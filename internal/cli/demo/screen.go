package demo

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/cli/text"
)

// Sizes of the screen, in columns and lines.
const (
	minWidth    = 72
	maxWidth    = 132
	leftWidth   = 16
	rightWidth  = 24
	maxNotes    = 4
	aroundLanes = 8 + maxNotes // lines that are not lanes
)

// step is the time between two columns while the demo runs.
const step = 20 * time.Millisecond

// marks show what a worker does at a moment.
var marks = map[state]string{idle: " ", waiting: "─", holding: "█", dead: "░"}

// screen draws the demo on a terminal, each time over the frame before. A column shows one
// moment, the same in all lanes. So two lanes show a hold in the same column only if two
// workers held the lock at once.
type screen struct {
	out   io.Writer
	d     *Demo
	width func() int // of the terminal now
	frame text.Frame
	notes []string // the last few, oldest first
}

func newScreen(out io.Writer, d *Demo, width func() int) *screen {
	fmt.Fprint(out, "\x1b[?25l") // hide the cursor
	return &screen{out: out, d: d, width: width}
}

// wrote does nothing: draw shows the number.
func (s *screen) wrote(*timeline, int, time.Duration, int) error { return nil }

func (s *screen) note(at time.Duration, what string) error {
	s.notes = append(s.notes, fmt.Sprintf("%9.2fs  %s", at.Seconds(), what))
	s.notes = s.notes[max(0, len(s.notes)-maxNotes):]
	return nil
}

// draw shows the last few seconds.
func (s *screen) draw(t *timeline) {
	// Whole steps: so columns move to the left from frame to frame and do not
	// change.
	end := t.now() / step * step
	s.paint(t, end-time.Duration(s.columns())*step, step, t.now())
}

// close shows the whole run, and leaves it on the terminal.
func (s *screen) close(t *timeline) {
	if s.frame > 0 {
		s.paint(t, 0, max(t.End/time.Duration(s.columns()), 1), t.End)
	}
	fmt.Fprint(s.out, "\x1b[?25h\n") // show the cursor
}

// columns is how many columns a lane has.
func (s *screen) columns() int {
	return min(max(s.width(), minWidth)-1, maxWidth) - leftWidth - rightWidth
}

// paint draws a frame that begins at a time.
func (s *screen) paint(t *timeline, from, step, now time.Duration) {
	columns, all := s.columns(), s.d.expected()
	bar := min(columns*t.Number/all, columns)
	rows := []string{
		fmt.Sprintf("  hasp demo  %s · one number in a file · %s", text.Count(s.d.Workers, "process", "processes"), s.d.place),
		"",
		fmt.Sprintf("%-*s%s%s  %-12s%8.2fs", leftWidth, "  number", strings.Repeat("█", bar), strings.Repeat("·", columns-bar),
			fmt.Sprintf("%d of %d", t.Number, all), now.Seconds()),
	}
	if s.d.Ordered {
		rows = append(rows, fmt.Sprintf("%-*s%s", leftWidth, "  next in line", workers(t.in(waiting, now))))
	}

	rows = append(rows, "")
	for i, l := range t.Lanes {
		row := fmt.Sprintf("  %-3dpid %-*d", i+1, leftWidth-9, l.PID)
		for c := range columns {
			at := from + time.Duration(c)*step
			if l.killed && at <= t.Death.At && t.Death.At < at+step {
				row += "✗"
			} else {
				row += marks[l.at(at).State]
			}
		}
		rows = append(rows, fmt.Sprintf("%s  %3d %s", row, l.done, l.status(now)))
	}

	legend := "█ holds   ─ waits   ✗ killed   ░ killed holder, key still locked"
	if s.d.NoLock {
		legend = "█ reads, pauses and writes, without a lock"
	}
	rows = append(rows, "", strings.Repeat(" ", leftWidth)+legend)
	_ = s.frame.Draw(s.out, columns+leftWidth+rightWidth, append(rows, s.notes...))
}

// status says what the worker of a lane does at a time.
func (l *lane) status(now time.Duration) string {
	switch sp := l.at(now); {
	case sp.State == dead:
		return "dead, key locked"
	case l.killed:
		return "killed"
	case l.ended:
		return "done"
	case sp.State != idle:
		return fmt.Sprintf("%s %s", sp.State, text.Duration(now-sp.From))
	}
	return ""
}
