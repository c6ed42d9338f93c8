package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
)

// colors contains the colors of contestants in the picture. The colors of hasp's contestants are
// also distinct for color-blind readers.
var colors = map[string]string{
	"bare": "#202020", ringName: "#707070",
	"hasp-spinlock": "#0072b2", "hasp-pubsublock": "#d55e00", "hasp-fairlock": "#009e73",
	"redislock": "#e69f00", "redsync": "#94679d", "rueidislock": "#bcbd22", "etcd": "#a02020",
}

// svg is a picture that is being drawn.
type svg struct{ bytes.Buffer }

func (s *svg) text(x, y float64, anchor string, size int, text string) {
	fmt.Fprintf(s, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%d\">%s</text>\n", x,
		y, anchor, size, html.EscapeString(text))
}

func (s *svg) line(x1, y1, x2, y2 float64, color string) {
	fmt.Fprintf(s, "<path d=\"M%.1f,%.1fL%.1f,%.1f\" stroke=\"%s\"/>\n", x1, y1, x2, y2, color)
}

// picture returns the picture of the front page as SVG. The upper diagrams show free keys, and one
// key that callers release at once. The lower diagrams show one key that callers hold.
func (r *results) picture() []byte {
	s := new(svg)
	fmt.Fprintln(s, `<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="740" viewBox="0 0 1000 740" font-family="Liberation Sans,Arial,sans-serif">
<rect width="1000" height="740" fill="#fff"/>`)
	r.drawBars(s, 0, 0, "Lock and Unlock of a free key, 64 goroutines", "pairs/s", callers(64),
		"pairs_per_s")
	rates := []string{"acquisitions_per_s", "holders_per_s"}
	rate := "acquisitions/s (full color: by another caller)"
	p := planOf(r.Quick)
	free := p.sections(contended)[0]
	held := p.held(1)[0]
	r.drawBars(s, 500, 0, "One key, "+free.setting, rate, free, rates...)
	r.drawBars(s, 0, 380, "One key, "+held.setting, rate, held, rates...)
	r.drawBars(s, 500, 380, "One key, "+held.setting, "longest wait, ms", held, "longest_wait_ms")
	s.text(990, 732, "end", 11, "Commit "+r.Commit+", "+r.date())
	fmt.Fprintln(s, "</svg>")
	return s.Bytes()
}

// drawBars draws a diagram at (dx, dy), with a bar for each contestant. The length of a bar is the
// first metric. If there is a second metric, a bar has its full color only up to that metric.
func (r *results) drawBars(s *svg, dx, dy int, title, unit string, in section, metrics ...string) {
	const (
		left   = 170
		right  = 480
		top    = 40
		bottom = 310
	)
	of := func(name, metric string) float64 { return max(r.median(in.cell(name), metric), 0) }
	names := slices.DeleteFunc(slices.Concat([]string{"bare"}, shown, []string{ringName}),
		func(name string) bool { return !(of(name, metrics[0]) > 0) })
	high := 0.0
	for _, name := range names {
		high = max(high, of(name, metrics[0]))
	}
	if high == 0 {
		return
	}
	x := func(v float64) float64 { return left + (right-left)*v/high }

	fmt.Fprintf(s, "<g transform=\"translate(%d,%d)\">\n", dx, dy)
	s.text((left+right)/2, 22, "middle", 13, title)
	s.text((left+right)/2, 350, "middle", 11, unit)
	step := math.Pow(10, math.Floor(math.Log10(high)))
	if high < 3*step {
		step /= 2
	} else if high > 6*step {
		step *= 2
	}
	for v := 0.0; v <= high; v += step {
		s.line(x(v), top, x(v), bottom, "#ddd")
		s.text(x(v), bottom+18, "middle", 11, number(v))
	}

	for i, name := range names {
		y := top + float64(bottom-top)/float64(len(names))*(float64(i)+0.2)
		s.text(left-8, y+13, "end", 11, name)
		for n, metric := range metrics {
			opacity := 1.0
			if n < len(metrics)-1 {
				opacity = 0.35
			}
			if v := of(name, metric); v > 0 {
				fmt.Fprintf(s, "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"18\" fill=\"%s\" fill-opacity=\"%g\"/>\n", left, y, x(v)-left, colors[name], opacity)
			}
		}
	}

	fmt.Fprintln(s, "</g>")
}
