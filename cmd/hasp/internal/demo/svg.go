package demo

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// Sizes of the picture, in its own units.
const (
	svgWidth  = 1120
	svgLeft   = 128 // before the lanes
	svgRight  = 40
	svgTop    = 92
	svgLane   = 30
	svgBar    = 16
	svgGraph  = 90 // height of the number's curve
	svgBottom = 74
)

// svgStyle follows the light or dark mode of the reader. It has no CSS variables,
// because not every viewer supports them.
const svgStyle = `
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
  .title { font-size: 17px; font-weight: 600; }
  .card { fill: #ffffff; stroke: #d8dee4; }
  .dim { fill: #6e7781; }
  .dead { fill: #cf222e; }
  .rule { stroke: #d8dee4; }
  .wait { fill: #c6cdd5; }
  .until { stroke: #cf222e; stroke-dasharray: 3 3; }
  .number { fill: none; stroke: #1a7f37; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .card { fill: #0d1117; stroke: #21262d; }
    .dim { fill: #8b949e; }
    .dead { fill: #ff6b6b; }
    .rule { stroke: #21262d; }
    .wait { fill: #3d444d; }
    .until { stroke: #ff6b6b; }
    .number { stroke: #3fb950; }
  }
`

// drawSVG draws the whole timeline: a lane for each worker, and a curve of the
// number below them.
func drawSVG(out io.Writer, d *Demo, t *timeline, sum Summary) error {
	p := &picture{d: d, t: t, sum: sum, end: max(t.end(), time.Millisecond)}
	p.lanesEnd = svgTop + len(t.lanes)*svgLane
	p.graphEnd = p.lanesEnd + 24 + svgGraph
	height := p.graphEnd + svgBottom
	p.f(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="timeline of hasp demo">`,
		svgWidth, height, svgWidth, height)
	p.b.WriteString("<style>" + svgStyle + "</style>\n")
	p.f(`<defs><pattern id="dead" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">` +
		`<rect class="dead" width="2.5" height="7"/></pattern></defs>`)
	p.f(`<rect class="card" x="0.5" y="0.5" width="%d" height="%d" rx="10"/>`, svgWidth-1, height-1)
	p.head()
	p.axis()
	for i := range t.lanes {
		p.lane(i)
	}
	p.curve()
	p.legend(height - 24)
	p.f(`</svg>`)
	_, err := out.Write(p.b.Bytes())
	return err
}

// picture is an SVG that is being drawn.
type picture struct {
	b        bytes.Buffer
	d        *Demo
	t        *timeline
	sum      Summary
	end      time.Duration // of the timeline
	lanesEnd int           // the y below the lanes
	graphEnd int           // the y below the curve
}

// f adds a line. It escapes strings among args: they are text, not markup.
func (p *picture) f(format string, args ...any) {
	for i, a := range args {
		if s, ok := a.(string); ok {
			var b strings.Builder
			_ = xml.EscapeText(&b, []byte(text.Plain(s)))
			args[i] = b.String()
		}
	}
	fmt.Fprintf(&p.b, format+"\n", args...)
}

// x returns the position of a moment.
func (p *picture) x(at time.Duration) float64 {
	return svgLeft + float64(svgWidth-svgLeft-svgRight)*float64(min(at, p.end))/float64(p.end)
}

func (p *picture) head() {
	p.f(`<text class="title" x="28" y="38">hasp demo: %s, %s, one number in a file</text>`,
		text.Count(p.d.Workers, "process", "processes"), p.d.place)
	outcome := fmt.Sprintf("%d of %d increments are in the number", p.sum.Number, p.sum.Expected)
	if h := p.sum.Heir; h > 0 {
		outcome += fmt.Sprintf("; worker %d was killed while it held the lock, worker %d took over %s later",
			p.sum.Killed, h, text.Duration(p.t.killed.takeover))
	}
	class := "dim"
	if !p.sum.OK {
		class = "dead"
	}
	p.f(`<text class="%s" x="28" y="60">%s</text>`, class, outcome)
}

// axis draws rules at round times, about ten in all.
func (p *picture) axis() {
	every := time.Millisecond
	for _, f := range []time.Duration{2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 600_000} {
		if p.end/every > 12 {
			every = f * time.Millisecond
		}
	}
	for at := time.Duration(0); at <= p.end; at += every {
		p.f(`<line class="rule" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`, p.x(at), svgTop-10, p.x(at), p.graphEnd)
		p.f(`<text class="dim" x="%.1f" y="%d" text-anchor="middle">%gs</text>`, p.x(at), p.graphEnd+18, at.Seconds())
	}
}

// lane draws the timeline of one worker.
func (p *picture) lane(i int) {
	l := &p.t.lanes[i]
	y := svgTop + i*svgLane
	middle := y + svgLane/2
	p.f(`<text x="28" y="%d">%d<tspan class="dim" dx="8">pid %d</tspan></text>`, middle+4, i+1, l.pid)
	for _, s := range l.spans {
		from, width := p.x(s.from), max(p.x(s.to)-p.x(s.from), 0.8)
		took := text.Duration(min(s.to, p.end) - s.from)
		switch s.state {
		case waiting:
			p.f(`<rect class="wait" x="%.1f" y="%d" width="%.1f" height="2"><title>worker %d waited %s</title></rect>`,
				from, middle-1, width, i+1, took)
		case holding:
			p.f(`<rect x="%.1f" y="%d" width="%.1f" height="%d" rx="1.5" fill="%s"><title>worker %d held %s from %s</title></rect>`,
				from, middle-svgBar/2, width, svgBar, laneHex[i%len(laneHex)], i+1, took, text.Duration(s.from))
		case dead:
			p.f(`<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="url(#dead)"><title>key still locked for the killed worker %d for %s</title></rect>`,
				from, middle-svgBar/2, width, svgBar, i+1, took)
		}
	}
	if k := p.t.killed; k != nil && k.lane == i {
		p.f(`<text class="dead" x="%.1f" y="%d" text-anchor="middle" font-weight="700">✗</text>`, p.x(k.at), middle-svgBar/2-2)
		if k.heir >= 0 {
			x := p.x(k.at + k.takeover)
			p.f(`<line class="until" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`, x, middle, x, svgTop+k.heir*svgLane+svgLane/2)
		}
	}
}

// curve draws the number as the workers wrote it, in steps.
func (p *picture) curve() {
	top, bottom := float64(p.lanesEnd+24), float64(p.graphEnd)
	y := func(n int) float64 { return bottom - (bottom-top)*float64(n)/float64(p.sum.Expected) }
	p.f(`<text x="28" y="%.1f">number</text>`, bottom-4)
	p.f(`<text class="dim" x="%d" y="%.1f" text-anchor="end">%d</text>`, svgLeft-10, top+4, p.sum.Expected)
	path := fmt.Sprintf("M%.1f %.1f", p.x(0), y(0))
	last := 0
	for _, pt := range p.t.number {
		path += fmt.Sprintf("H%.1fV%.1f", p.x(pt.at), y(pt.n))
		last = pt.n
	}
	path += fmt.Sprintf("H%.1f", p.x(p.end))
	p.f(`<path class="number" d="%s"><title>%d at the end</title></path>`, path, last)
}

// legend explains the shapes.
func (p *picture) legend(y int) {
	x := svgLeft
	item := func(shape, label string) {
		p.f(shape, x, y-9)
		p.f(`<text class="dim" x="%d" y="%d">%s</text>`, x+28, y, label)
		x += 52 + 8*len(label)
	}
	hold := `<rect x="%d" y="%d" width="20" height="10" rx="1.5" fill="` + laneHex[0] + `"/>`
	if p.d.NoLock {
		item(hold, "reads the number, pauses, and writes it, without a lock")
		return
	}
	item(hold, "holds the lock")
	item(`<rect class="wait" x="%d" y="%d" width="20" height="2" transform="translate(0 4)"/>`, "waits")
	if p.t.killed != nil {
		item(`<rect x="%d" y="%d" width="20" height="10" fill="url(#dead)"/>`, "killed: the key stays locked until the term ends")
	}
}
