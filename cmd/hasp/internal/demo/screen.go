package demo

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/cmd/hasp/internal/text"
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

// The lanes use these colours in turn, on the terminal and in the picture.
var (
	laneColours = []int{39, 214, 170, 78, 221, 75, 209, 150}
	laneHex     = []string{"#00afff", "#ffaf00", "#d75fd7", "#5fd787", "#ffd75f", "#5fafff", "#ff875f", "#afd787"}
)

func laneStyle(i int) string { return fmt.Sprintf("38;5;%d", laneColours[i%len(laneColours)]) }

// screen draws the demo on a terminal, each time over the frame before.
type screen struct {
	out    io.Writer
	d      *Demo
	resize func() int // the terminal's width now
	width  int        // of the last frame
	height int        // of the last frame, in lines; 0 before the first
	colour bool
	notes  []note    // the last few, oldest first
	last   *timeline // of the last frame
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
func (s *screen) wrote(*timeline, int, time.Duration, int) {}

func (s *screen) note(at time.Duration, what string) {
	s.notes = append(s.notes, note{at, what})
	s.notes = s.notes[max(0, len(s.notes)-maxNotes):]
}

// draw shows the last few seconds.
func (s *screen) draw(t *timeline) {
	s.last = t
	s.width = min(max(s.resize(), minWidth)-1, maxWidth)
	columns := s.columns()
	// Whole steps: so columns move to the left from frame to frame and do not
	// change.
	end := t.now() / step * step
	s.paint(t, end-time.Duration(2*columns)*step, step, t.now())
}

// close shows the whole run, and leaves it on the terminal.
func (s *screen) close() {
	if t := s.last; t != nil {
		end := t.end()
		s.paint(t, 0, max(end/time.Duration(2*s.columns()), 1), end)
	}
	fmt.Fprint(s.out, "\x1b[?25h\n") // show the cursor
}

func (s *screen) columns() int { return s.width - leftWidth - rightWidth }

// paint draws a frame that begins at a time. Half a column shows one moment,
// the same in all lanes. So two lanes show a hold in the same half column only
// if two workers held the lock at once.
func (s *screen) paint(t *timeline, from, half, now time.Duration) {
	var lines []string
	add := func(build func(r *row)) {
		r := &row{max: s.width, colour: s.colour}
		build(r)
		lines = append(lines, r.String())
	}

	add(func(r *row) {
		r.put(styleBold, "  hasp demo  ")
		r.put(styleDim, fmt.Sprintf("%s · one number in a file · %s", text.Count(s.d.Workers, "process", "processes"), s.d.place))
	})
	add(func(*row) {})
	add(func(r *row) { s.progress(r, t, now) })
	if s.d.ordered {
		add(func(r *row) { s.queue(r, t.inLine(now)) })
	}
	add(func(*row) {})
	for i := range max(len(t.lanes), s.d.Workers) {
		add(func(r *row) { s.lane(r, t, i, from, half, now) })
	}
	add(func(*row) {})
	add(s.legend)
	for _, n := range s.notes {
		add(func(r *row) {
			r.put(styleDim, fmt.Sprintf("%9.2fs  ", n.at.Seconds()))
			r.put("", n.text)
		})
	}

	// Move up to where the last frame begins, and write over it.
	var b strings.Builder
	if s.height > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.height)
	}
	for _, line := range lines {
		b.WriteString("\r" + line + "\x1b[K\n")
	}
	b.WriteString("\x1b[J")
	s.height = len(lines)
	_, _ = io.WriteString(s.out, b.String())
}

// progress draws the number as a bar, an eighth of a column at a time.
func (s *screen) progress(r *row, t *timeline, now time.Duration) {
	n := 0
	if len(t.number) > 0 {
		n = t.number[len(t.number)-1].n
	}
	full := s.columns() * 8
	eighths := min(full*n/s.d.expected(), full)
	bar := strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		bar += string([]rune(" ▏▎▍▌▋▊▉")[rest])
	}
	r.put("", fmt.Sprintf("%-*s", leftWidth, "  number"))
	r.put(styleGood, bar)
	r.put(styleDim, strings.Repeat("·", full/8-(eighths+7)/8))
	r.put(styleBold, fmt.Sprintf("  %-12s", fmt.Sprintf("%d of %d", n, s.d.expected())))
	r.put(styleDim, fmt.Sprintf("%8.2fs", now.Seconds()))
}

// queue names the workers that wait, in the order in which the store will serve
// them.
func (s *screen) queue(r *row, lanes []int) {
	r.put("", fmt.Sprintf("%-*s", leftWidth, "  in line"))
	for n, i := range lanes {
		switch n {
		case 0:
			r.put(styleDim, "next ")
		case 1:
			r.put(styleDim, ", then ")
		default:
			r.put(styleDim, ", ")
		}
		r.put(laneStyle(i), strconv.Itoa(i+1))
	}
}

// lane draws the line of one worker: its number and process, its timeline, and
// its status.
func (s *screen) lane(r *row, t *timeline, i int, from, half, now time.Duration) {
	if i >= len(t.lanes) {
		return
	}
	l := &t.lanes[i]
	r.put(laneStyle(i), fmt.Sprintf("  %-3d", i+1))
	r.put(styleDim, fmt.Sprintf("%-*s", leftWidth-5, fmt.Sprintf("pid %d", l.pid)))

	died := openEnd
	if l.killed {
		died = t.killed.at
	}
	for c := range s.columns() {
		at := from + time.Duration(2*c)*half
		if died >= at && died < at+2*half {
			r.put(styleDead, "✗")
		} else {
			drawCell(r, laneStyle(i), l.at(at).state, l.at(at+half).state)
		}
	}
	s.status(r, t, i, now)
}

// drawCell draws two moments in one column. If only one fits, a hold is shown
// rather than a wait.
func drawCell(r *row, style string, a, b state) {
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

// status names the present state of a worker.
func (s *screen) status(r *row, t *timeline, i int, now time.Duration) {
	l := &t.lanes[i]
	r.put(styleBold, fmt.Sprintf("  %3d ", l.done))
	switch sp := l.at(now); {
	case sp.state == dead:
		r.put(styleDead, "dead, key locked")
	case l.killed:
		r.put(styleDead, "killed")
	case l.ended:
		r.put(styleGood, "done")
	case sp.state == holding:
		r.put(styleBold, "holds "+text.Duration(now-sp.from))
	case sp.state == waiting:
		r.put(styleDim, "waits "+text.Duration(now-sp.from))
		if s.d.ordered && t.inLine(now)[0] == i {
			r.put(laneStyle(i), ", next")
		}
	}
}

func (s *screen) legend(r *row) {
	r.put("", fmt.Sprintf("%-*s", leftWidth, ""))
	if s.d.NoLock {
		r.put(styleBold, "█")
		r.put(styleDim, " reads, pauses and writes, without a lock")
		return
	}
	r.put(styleBold, "█")
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

// put adds text as far as it fits into the row. Each of its runes must be one
// column wide.
func (r *row) put(style, what string) {
	if r.colour && style != r.style {
		r.b.WriteString("\x1b[0")
		if style != "" {
			r.b.WriteString(";" + style)
		}
		r.b.WriteString("m")
		r.style = style
	}
	for _, c := range what {
		if r.n < r.max {
			r.b.WriteRune(c)
			r.n++
		}
	}
}

func (r *row) String() string {
	if r.style != "" {
		return r.b.String() + "\x1b[0m"
	}
	return r.b.String()
}
