package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
)

// colors are the colors of contestants in the picture. Those of hasp are also
// distinct for color-blind readers.
var colors = map[string]string{
	"bare": "#202020", ringName: "#707070",
	"hasp-spinlock": "#0072b2", "hasp-pubsublock": "#d55e00", "hasp-fairlock": "#009e73",
	"redislock": "#e69f00", "redsync": "#94679d", "rueidislock": "#bcbd22", "etcd": "#a02020",
}

// svg is a picture that is being drawn.
type svg struct{ bytes.Buffer }

func (s *svg) text(x, y float64, anchor string, size int, text string) {
	fmt.Fprintf(s, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%d\">%s</text>\n", x, y, anchor, size, html.EscapeString(text))
}

func (s *svg) line(x1, y1, x2, y2 float64, color string) {
	fmt.Fprintf(s, "<path d=\"M%.1f,%.1fL%.1f,%.1f\" stroke=\"%s\"/>\n", x1, y1, x2, y2, color)
}

// picture returns the picture of the front page as SVG. Above are pairs on free
// keys, and one contended key; below is one key that is held.
func (r *results) picture(p plan) []byte {
	s := new(svg)
	fmt.Fprintln(s, `<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="740" viewBox="0 0 1000 740" font-family="Liberation Sans,Arial,sans-serif">
<rect width="1000" height="740" fill="#fff"/>`)
	r.drawFree(s, p)
	rates := []string{"acquisitions_per_s", "holders_per_s"}
	rate := "acquisitions/s (full color: by another caller)"
	r.drawBars(s, 500, 0, "One key, hold 0, 64 waiters, 4 processes", rate, queue(64), rates...)
	r.drawBars(s, 0, 380, "The same, hold 1 ms", rate, queueOf1ms, rates...)
	r.drawBars(s, 500, 380, "The same, hold 1 ms", "longest wait, ms", queueOf1ms, "longest_wait_ms")
	fmt.Fprintln(s, "</svg>")
	return s.Bytes()
}

// curve is a line of the diagram of free keys. It has a value for each number of goroutines;
// NaN if there is none.
type curve struct {
	name   string
	style  string // of the path
	values []float64
}

// drawFree draws pairs/s over goroutines, both on logarithmic axes.
func (r *results) drawFree(s *svg, p plan) {
	const left, right, top, bottom = 70, 400, 40, 310
	var curves []curve
	low, high := math.Inf(1), 0.0
	for _, name := range append([]string{"bare"}, shown[:6]...) {
		width, dashes := 1.5, ""
		switch r.contestant(name).group {
		case ours:
			width = 3
		case theirs:
			dashes = ` stroke-dasharray="6 3"`
		}
		k := curve{name: name, style: fmt.Sprintf(`fill="none" stroke="%s" stroke-width="%g"%s`, colors[name], width, dashes)}
		for _, d := range p.distinct {
			v := r.median(callers(d.goroutines).cell(name), "pairs_per_s")
			if v > 0 {
				low, high = min(low, v), max(high, v)
			}
			k.values = append(k.values, v)
		}
		curves = append(curves, k)
	}
	if high == 0 {
		return
	}

	high = max(high, 1.1*low)
	first, last := p.distinct[0].goroutines, p.distinct[len(p.distinct)-1].goroutines
	x := func(d distinct) float64 {
		return left + (right-left)*math.Log(float64(d.goroutines)/float64(first))/math.Log(float64(last)/float64(first))
	}
	y := func(v float64) float64 { return bottom - (bottom-top)*math.Log(v/low)/math.Log(high/low) }
	s.text((left+right)/2, 22, "middle", 13, "Lock and Unlock of a free key, pairs/s")
	s.text((left+right)/2, 350, "middle", 11, "goroutines")
	for _, d := range p.distinct {
		s.line(x(d), top, x(d), bottom, "#ddd")
		s.text(x(d), bottom+18, "middle", 11, number(float64(d.goroutines)))
	}
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for _, v := range []float64{decade, 2 * decade, 5 * decade} {
			if v >= low && v <= high {
				s.line(left, y(v), right, y(v), "#ddd")
				s.text(left-6, y(v)+4, "end", 11, number(v))
			}
		}
	}
	at := float64(top + 20)
	for _, k := range curves {
		path, step := "", "M"
		for i, v := range k.values {
			if v > 0 {
				path += fmt.Sprintf("%s%.1f,%.1f", step, x(p.distinct[i]), y(v))
				step = "L"
			}
		}
		if path == "" {
			continue
		}
		for _, d := range []string{path, fmt.Sprintf("M%d,%.1fh24", right+14, at-4)} { // the line, and its sample in the legend
			fmt.Fprintf(s, "<path d=\"%s\" %s/>\n", d, k.style)
		}
		s.text(right+44, at, "start", 11, k.name)
		at += 20
	}
}

// drawBars draws a bar for each contestant at a place of the picture. It shows
// the first metric. If there is a second, its part of the bar has the full color.
func (r *results) drawBars(s *svg, dx, dy int, title, unit string, in section, metrics ...string) {
	const left, right, top, bottom = 170, 480, 40, 310
	of := func(name, metric string) float64 { return max(r.median(in.cell(name), metric), 0) }
	names := slices.DeleteFunc(append(slices.Clone(shown), ringName), func(name string) bool { return !(of(name, metrics[0]) > 0) })
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
