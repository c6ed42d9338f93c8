package main

import (
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
)

// svg is a picture on a card of its own, which can be read on light pages and
// on dark ones.
type svg struct{ strings.Builder }

const head = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" role="img">
<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.quiet { fill: #656d76; font-size: 12px }
.card { fill: #ffffff; stroke: #d0d7de }
.grid { stroke: #d8dee4; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.quiet { fill: #9198a1 }
.card { fill: #0d1117; stroke: #3d444d }
.grid { stroke: #2a3038 }
}
</style>
<rect class="card" x="0.5" y="0.5" width="%[3]d" height="%[4]d" rx="8"/>
`

func newSVG(wide, high int) *svg {
	s := &svg{}
	fmt.Fprintf(s, head, wide, high, wide-1, high-1)
	return s
}

func (s *svg) end() []byte { return []byte(s.String() + "</svg>\n") }

// text is anchored at its start, middle or end.
func (s *svg) text(x, y float64, class, anchor, text string) {
	fmt.Fprintf(s, `<text x="%.1f" y="%.1f" class="%s" text-anchor="%s">`, x, y, class, anchor)
	_ = xml.EscapeText(s, []byte(text)) // a Builder takes all
	fmt.Fprintln(s, "</text>")
}

func (s *svg) grid(x1, y1, x2, y2 float64) {
	fmt.Fprintf(s, `<line class="grid" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`+"\n", x1, y1, x2, y2)
}

func (s *svg) bar(x, y, wide, high float64, color string, opacity float64) {
	fmt.Fprintf(s, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s" opacity="%.2f"/>`+"\n", x, y, wide, high, color, opacity)
}

// series is a line of a chart.
type series struct {
	name  string
	group string
	color string
	at    []xy
}

type xy struct{ x, y float64 }

// polyline has hasp thick, peers dashed, and dots on all.
func (s *svg) polyline(l series, at []xy) {
	width, dashes := "1.5", ""
	switch l.group {
	case ours:
		width = "3"
	case theirs:
		dashes = ` stroke-dasharray="6 4"`
	}
	fmt.Fprintf(s, `<polyline fill="none" stroke="%s" stroke-width="%s"%s points="`, l.color, width, dashes)
	for _, p := range at {
		fmt.Fprintf(s, "%.1f,%.1f ", p.x, p.y)
	}
	fmt.Fprintln(s, `"/>`)
	for _, p := range at {
		fmt.Fprintf(s, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", p.x, p.y, l.color)
	}
}

// box is a part of a picture.
type box struct{ x, y, wide, high float64 }

// Around what a chart shows.
const (
	forTicks  = 62
	forTitle  = 60
	forLabels = 46
	forLegend = 185
)

// chart draws lines on two logarithmic axes, with a legend.
func (s *svg) chart(b box, title, xName, yName string, lines []series) {
	var xs, ys []float64
	for _, l := range lines {
		for _, p := range l.at {
			xs, ys = append(xs, p.x), append(ys, p.y)
		}
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	in := box{b.x + forTicks, b.y + forTitle, b.wide - forTicks - forLegend, b.high - forTitle - forLabels}
	left, right := xs[0], max(xs[len(xs)-1], xs[0]*2)
	ticks := ticks(slices.Min(ys), slices.Max(ys))
	low, high := ticks[0], ticks[len(ticks)-1]
	placeX := func(x float64) float64 { return in.x + in.wide*math.Log(x/left)/math.Log(right/left) }
	placeY := func(y float64) float64 { return in.y + in.high*(1-math.Log(y/low)/math.Log(high/low)) }

	s.text(b.x+16, b.y+24, "title", "start", title)
	s.text(b.x+16, b.y+42, "quiet", "start", yName)
	s.text(in.x+in.wide/2, in.y+in.high+36, "quiet", "middle", xName)
	for _, x := range xs {
		s.grid(placeX(x), in.y, placeX(x), in.y+in.high)
		s.text(placeX(x), in.y+in.high+18, "quiet", "middle", number(x))
	}
	for _, y := range ticks {
		s.grid(in.x, placeY(y), in.x+in.wide, placeY(y))
		s.text(in.x-8, placeY(y)+4, "quiet", "end", short(y))
	}
	for i, l := range lines {
		var at []xy
		for _, p := range l.at {
			at = append(at, xy{placeX(p.x), placeY(p.y)})
		}
		s.polyline(l, at)
		y := in.y + 8 + 20*float64(i)
		s.polyline(l, []xy{{in.x + in.wide + 18, y}, {in.x + in.wide + 42, y}})
		s.text(in.x+in.wide+50, y+4, "", "start", l.name)
	}
}

// ticks are round numbers around a range, some per power of ten if it is
// small.
func ticks(low, high float64) (all []float64) {
	steps := []float64{1}
	if high/low < 200 {
		steps = []float64{1, 2, 5}
	}
	for power := math.Floor(math.Log10(low)); ; power++ {
		for _, step := range steps {
			all = append(all, step*math.Pow(10, power))
			if n := len(all); n > 1 && all[1] <= low {
				all = all[1:]
			} else if n > 1 && all[n-1] >= high {
				return all
			}
		}
	}
}

// short is a number on an axis.
func short(f float64) string {
	switch {
	case f >= 1e6:
		return fmt.Sprintf("%gM", f/1e6)
	case f >= 1e3:
		return fmt.Sprintf("%gk", f/1e3)
	}
	return fmt.Sprintf("%.3g", f)
}

// stack is a bar and the part of it that counts for more.
type stack struct {
	name        string
	color       string
	whole, part float64
}

// bars draws them beside their names, on a linear scale.
func (s *svg) bars(b box, title, subtitle string, all []stack) {
	const forNames, forNumbers, step = 150, 70, 26
	most := 0.0
	for _, k := range all {
		most = max(most, k.whole)
	}
	s.text(b.x+16, b.y+24, "title", "start", title)
	s.text(b.x+16, b.y+42, "quiet", "start", subtitle)
	wide := b.wide - forNames - forNumbers
	for i, k := range all {
		y := b.y + forTitle + step*float64(i)
		s.text(b.x+forNames-8, y+14, "", "end", k.name)
		s.bar(b.x+forNames, y, max(wide*k.whole/most, 1), step-8, k.color, 0.35)
		s.bar(b.x+forNames, y, wide*k.part/most, step-8, k.color, 1)
		s.text(b.x+forNames+wide*k.whole/most+6, y+14, "quiet", "start", number(k.whole))
	}
}
