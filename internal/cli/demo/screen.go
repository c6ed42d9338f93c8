package demo

import (
	"fmt"
	"io"
	"os"
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

// step is the time that half a column shows while the demo runs.
const step = 20 * time.Millisecond

// Styles, as parameters of the terminal's SGR sequence.
const (
	styleBold = "1"
	styleDim  = "2"
	styleDead = "38;5;196"
	styleGood = "38;5;78"
)

// The lanes use these colours in turn.
var laneColours = []int{39, 214, 170, 78, 221, 75, 209, 150}

func laneStyle(i int) string { return fmt.Sprintf("38;5;%d", laneColours[i%len(laneColours)]) }

// screen draws the demo on a terminal, each time over the frame before.
type screen struct {
	out    io.Writer
	d      *Demo
	resize func() int // the terminal's width now
	width  int        // of the last frame
	height int        // of the last frame, in lines; 0 before the first
	colour bool
	notes  []note // the last few, oldest first
	rows   []*row // of the frame that is being drawn
}

type note struct {
	at   time.Duration
	text string
}

func newScreen(out io.Writer, d *Demo, resize func() int) *screen {
	fmt.Fprint(out, "\x1b[?25l") // hide the cursor
	return &screen{out: out, d: d, resize: resize, colour: os.Getenv("NO_COLOR") == ""}
}

// wrote does nothing: draw shows the number.
func (s *screen) wrote(*timeline, int, time.Duration, int) error { return nil }

func (s *screen) note(at time.Duration, what string) error {
	s.notes = append(s.notes, note{at, what})
	s.notes = s.notes[max(0, len(s.notes)-maxNotes):]
	return nil
}

// draw shows the last few seconds.
func (s *screen) draw(t *timeline) {
	s.width = min(max(s.resize(), minWidth)-1, maxWidth)

	// Whole steps: so columns move to the left from frame to frame and do not
	// change.
	end := t.now() / step * step
	s.paint(t, end-time.Duration(2*s.columns())*step, step, t.now())
}

// close shows the whole run, and leaves it on the terminal.
func (s *screen) close(t *timeline) {
	if s.height > 0 {
		s.paint(t, 0, max(t.End/time.Duration(2*s.columns()), 1), t.End)
	}
	fmt.Fprint(s.out, "\x1b[?25h\n") // show the cursor
}

func (s *screen) columns() int { return s.width - leftWidth - rightWidth }

// paint draws a frame that begins at a time. Half a column shows one moment,
// the same in all lanes. So two lanes show a hold in the same half column only
// if two workers held the lock at once.
func (s *screen) paint(t *timeline, from, half, now time.Duration) {
	s.rows = nil
	head := s.row("")
	head.put(styleBold, "  hasp demo  ")
	head.put(styleDim, "%s · one number in a file · %s", text.Count(s.d.Workers, "process", "processes"), s.d.place)
	s.row("")
	s.progress(t, now)
	if s.d.Ordered {
		s.queue(t.inLine(now))
	}

	s.row("")
	for i := range max(len(t.Lanes), s.d.Workers) {
		r := s.row("")
		if i < len(t.Lanes) {
			s.lane(r, t, i, from, half, now)
		}
	}

	s.row("")
	s.legend()
	for _, n := range s.notes {
		r := s.row("")
		r.put(styleDim, "%9.2fs  ", n.at.Seconds())
		r.put("", "%s", n.text)
	}
	s.show()
}

// show moves up to where the last frame begins, and writes the new one over it.
func (s *screen) show() {
	var b strings.Builder
	if s.height > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.height)
	}
	for _, r := range s.rows {
		fmt.Fprintf(&b, "\r%s\x1b[K\n", r)
	}
	b.WriteString("\x1b[J")
	s.height = len(s.rows)
	_, _ = io.WriteString(s.out, b.String())
}

// progress draws the number as a bar, an eighth of a column at a time.
func (s *screen) progress(t *timeline, now time.Duration) {
	full := s.columns() * 8
	eighths := min(full*t.Number/s.d.expected(), full)
	bar := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		bar += string([]rune(" ▏▎▍▌▋▊▉")[rest])
	}

	r := s.row("  number")
	r.put(styleGood, "%s", bar)
	r.put(styleDim, "%s", strings.Repeat("·", full/8-(eighths+7)/8))
	r.put(styleBold, "  %-12s", fmt.Sprintf("%d of %d", t.Number, s.d.expected()))
	r.put(styleDim, "%8.2fs", now.Seconds())
}

// queue names the workers that wait, in the order in which they should be served.
func (s *screen) queue(lanes []int) {
	r := s.row("  in line")
	before := "next "
	for n, i := range lanes {
		if n == 1 {
			before = ", then "
		} else if n > 1 {
			before = ", "
		}
		r.put(styleDim, "%s", before)
		r.put(laneStyle(i), "%d", i+1)
	}
}

// lane draws the line of one worker: its number and process, its timeline, and
// its status.
func (s *screen) lane(r *row, t *timeline, i int, from, half, now time.Duration) {
	l := &t.Lanes[i]
	r.put(laneStyle(i), "  %-3d", i+1)
	r.put(styleDim, "%-*s", leftWidth-5, fmt.Sprintf("pid %d", l.PID))

	died := openEnd
	if l.killed {
		died = t.Death.At
	}
	for c := range s.columns() {
		at := from + time.Duration(2*c)*half
		if died >= at && died < at+2*half {
			r.put(styleDead, "✗")
		} else {
			r.cell(laneStyle(i), l.at(at).State, l.at(at+half).State)
		}
	}
	s.status(r, t, i, now)
}

// status names the present state of a worker.
func (s *screen) status(r *row, t *timeline, i int, now time.Duration) {
	l := &t.Lanes[i]
	r.put(styleBold, "  %3d ", l.done)
	switch sp := l.at(now); {
	case sp.State == dead:
		r.put(styleDead, "dead, key locked")
	case l.killed:
		r.put(styleDead, "killed")
	case l.ended:
		r.put(styleGood, "done")
	case sp.State == holding:
		r.put(styleBold, "holds %s", text.Duration(now-sp.From))
	case sp.State == waiting:
		r.put(styleDim, "waits %s", text.Duration(now-sp.From))
		if s.d.Ordered && t.inLine(now)[0] == i {
			r.put(laneStyle(i), ", next")
		}
	}
}

func (s *screen) legend() {
	r := s.row(" ")
	r.put(styleBold, "█")
	if s.d.NoLock {
		r.put(styleDim, " reads, pauses and writes, without a lock")
		return
	}
	r.put(styleDim, " holds   ─ waits   ")
	r.put(styleDead, "✗")
	r.put(styleDim, " killed   ")
	r.put(styleDead, "░")
	r.put(styleDim, " killed holder, key still locked")
}

// row is one line of the screen. A longer line would wrap, and the next frame
// would be drawn in the wrong place.
type row struct {
	b      strings.Builder
	n, max int    // columns used, and allowed
	style  string // of the last put
	colour bool
}

// row adds a row to the frame. If it has a title, the title fills the left column.
func (s *screen) row(title string) *row {
	r := &row{max: s.width, colour: s.colour}
	s.rows = append(s.rows, r)
	if title != "" {
		r.put("", "%-*s", leftWidth, title)
	}
	return r
}

// put adds text as far as it fits into the row. Each of its runes must be one
// column wide.
func (r *row) put(style, format string, args ...any) {
	if r.colour && style != r.style {
		r.b.WriteString("\x1b[0;" + style + "m")
		r.style = style
	}
	for _, c := range fmt.Sprintf(format, args...) {
		if r.n < r.max {
			r.b.WriteRune(c)
			r.n++
		}
	}
}

// cell adds a column that shows two moments. If only one fits, a hold is shown
// rather than a wait.
func (r *row) cell(style string, a, b state) {
	switch {
	case a == holding && b == holding:
		r.put(style, "█")
	case a == holding:
		r.put(style, "▌")
	case b == holding:
		r.put(style, "▐")
	case a == dead || b == dead:
		r.put(styleDead, "░")
	case a == waiting || b == waiting:
		r.put(styleDim, "─")
	default:
		r.put("", " ")
	}
}

// String returns the text of the row, in its styles.
func (r *row) String() string {
	if r.style != "" {
		return r.b.String() + "\x1b[0m"
	}
	return r.b.String()
}
