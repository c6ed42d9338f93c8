package main

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// svg is a picture of one chart or several beside each other, on white, so
// that it can be read on dark pages, too.
type svg struct {
	canvas *vgsvg.Canvas
	whole  draw.Canvas
}

func newSVG(wide, high vg.Length) *svg {
	c := vgsvg.New(wide, high)
	s := &svg{c, draw.New(c)}
	s.whole.SetColor(color.White)
	s.whole.Fill(s.whole.Rectangle.Path())
	return s
}

// write names fonts to fall back on, which the library does not.
func (s *svg) write(path string) error {
	var out bytes.Buffer
	if _, err := s.canvas.WriteTo(&out); err != nil {
		return err
	}
	text := bytes.ReplaceAll(out.Bytes(), []byte("font-family:Liberation Sans"), []byte("font-family:Liberation Sans,Arial,sans-serif"))
	return os.WriteFile(path, text, 0o644)
}

// part is what lies between two distances from the left, with a margin.
func (s *svg) part(left, right vg.Length) draw.Canvas {
	const margin = 8
	return draw.Crop(s.whole, left+margin, right-s.whole.Max.X-margin, margin, -margin)
}

// series is a line of a chart.
type series struct {
	name  string
	group string
	place int // in its group
	at    plotter.XYs
}

// chart draws lines on two logarithmic axes, with a legend beside them.
func (s *svg) chart(left, right vg.Length, title, x, y string, lines []series) error {
	p := blank(title, x)
	p.Y.Label.Text = y
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = settings(lines), shortTicks{plot.LogTicks{Prec: -1}}
	p.Y.AutoRescale = true
	p.Add(plotter.NewGrid())
	legend := p.Legend
	p.Legend = plot.NewLegend() // not in the plot
	legend.Top, legend.Left, legend.Padding = true, true, vg.Points(2)
	for _, l := range lines {
		line, dots, err := plotter.NewLinePoints(l.at)
		if err != nil {
			return err
		}
		style(line, dots, l)
		p.Add(line, dots)
		legend.Add(l.name, line, dots)
	}
	const forLegend = 150
	at := s.part(left, right)
	p.Draw(draw.Crop(at, 0, -forLegend, 0, 0))
	legend.Draw(draw.Crop(at, right-left-forLegend, 0, 0, -vg.Centimeter))
	return nil
}

// blank is a plot in a font of which every system has one that is as wide.
func blank(title, x string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text = title, x
	p.Title.Padding = 6
	for _, f := range []*font.Font{&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font,
		&p.X.Tick.Label.Font, &p.Y.Tick.Label.Font, &p.Legend.TextStyle.Font} {
		f.Variant, f.Size = "Sans", 10
	}
	p.Title.TextStyle.Font.Size = 12
	return p
}

// settings are the ticks of what was measured.
func settings(lines []series) (ticks plot.ConstantTicks) {
	var all []float64
	for _, l := range lines {
		for _, at := range l.at {
			all = append(all, at.X)
		}
	}
	slices.Sort(all)
	for _, x := range slices.Compact(all) {
		ticks = append(ticks, plot.Tick{Value: x, Label: number(x)})
	}
	return ticks
}

var shapes = []draw.GlyphDrawer{draw.CircleGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.CrossGlyph{}, draw.PlusGlyph{}, draw.RingGlyph{}}

// style has hasp thick and peers dashed.
func style(line *plotter.Line, dots *plotter.Scatter, l series) {
	line.Color, line.Width = shade(l.group, l.place), vg.Points(1.2)
	switch l.group {
	case ours:
		line.Width = vg.Points(2.5)
	case theirs:
		line.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
	}
	dots.Color, dots.Shape, dots.Radius = line.Color, shapes[l.place%len(shapes)], vg.Points(2.5)
}

// stack is a bar and the part of it that counts for more.
type stack struct {
	name        string
	color       color.RGBA
	whole, part float64
}

// bars draws them beside their names, the first on top.
func (s *svg) bars(left, right vg.Length, title, x string, all []stack) error {
	p := blank(title, x)
	p.X.Min = 0
	p.X.Tick.Marker = shortTicks{plot.DefaultTicks{}}
	all = slices.Clone(all)
	slices.Reverse(all)
	var names []string
	for i, k := range all {
		names = append(names, k.name)
		pale := k.color
		for _, c := range []*uint8{&pale.R, &pale.G, &pale.B} {
			*c = 255 - (255-*c)/3
		}
		for _, b := range []struct {
			long  float64
			color color.Color
		}{{k.whole, pale}, {k.part, k.color}} {
			bar, err := plotter.NewBarChart(plotter.Values{b.long}, vg.Points(14))
			if err != nil {
				return err
			}
			bar.Horizontal, bar.XMin, bar.Color, bar.LineStyle.Width = true, float64(i), b.color, 0
			p.Add(bar)
		}
	}
	p.NominalY(names...)
	p.Draw(s.part(left, right))
	return nil
}

// shortTicks say thousands and millions.
type shortTicks struct{ plot.Ticker }

func (t shortTicks) Ticks(low, high float64) []plot.Tick {
	ticks := t.Ticker.Ticks(low, high)
	for i, t := range ticks {
		switch {
		case t.Label == "":
		case t.Value >= 1e6:
			ticks[i].Label = fmt.Sprintf("%gM", t.Value/1e6)
		case t.Value >= 1000:
			ticks[i].Label = fmt.Sprintf("%gk", t.Value/1000)
		}
	}
	return ticks
}
