package main

import (
	"encoding/csv"
	"fmt"
	"image/color"
	"os"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// plotSoak draws beside path, which go run ./internal/torture --uses has
// written, what the processes that lived all the time took of the machine.
func plotSoak(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return err
	}
	if len(rows) < 2 {
		return fmt.Errorf("%s: nothing in it", path)
	}
	column := map[string]int{}
	for i, name := range rows[0] {
		column[name] = i
	}
	for _, name := range []string{"strategy", "losing", "client", "generation", "seconds", "heap", "goroutines", "descriptors"} {
		if _, ok := column[name]; !ok {
			return fmt.Errorf("%s: no column %q", path, name)
		}
	}
	const wide, high = 900, 300
	s := newSVG(3*wide/2, high)
	for i, what := range []struct{ name, title string }{
		{"heap", "bytes that live on the heap"}, {"goroutines", "goroutines"}, {"descriptors", "descriptors"},
	} {
		var lines []series
		for _, row := range rows[1:] {
			if row[column["losing"]] != "false" || row[column["client"]] != "0" || row[column["generation"]] != "0" {
				continue
			}
			strategy := row[column["strategy"]]
			at := slices.IndexFunc(lines, func(l series) bool { return l.name == strategy })
			if at < 0 {
				at = len(lines)
				lines = append(lines, series{name: strategy, place: at})
			}
			x, err1 := strconv.ParseFloat(row[column["seconds"]], 64)
			y, err2 := strconv.ParseFloat(row[column[what.name]], 64)
			if err1 != nil || err2 != nil {
				return fmt.Errorf("%s: not numbers: %q", path, row)
			}
			lines[at].at = append(lines[at].at, plotter.XY{X: x, Y: y})
		}
		if err := s.course(vg.Length(i)*wide/2, vg.Length(i+1)*wide/2, what.title, "seconds under faults", lines); err != nil {
			return err
		}
	}
	out := strings.TrimSuffix(path, ".csv") + ".svg"
	fmt.Println(out)
	return s.write(out)
}

// course draws lines over time, from zero.
func (s *svg) course(left, right vg.Length, title, x string, lines []series) error {
	p := blank(title, x)
	p.Y.Min = 0
	p.X.Tick.Marker, p.Y.Tick.Marker = shortTicks{plot.DefaultTicks{}}, shortTicks{plot.DefaultTicks{}}
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	for _, l := range lines {
		line, err := plotter.NewLine(l.at)
		if err != nil {
			return err
		}
		line.Color, line.Width = courseColors[l.place%len(courseColors)], vg.Points(1)
		p.Add(line)
		p.Legend.Add(l.name, line)
	}
	p.Y.Max *= 1.4 // for the legend
	p.Draw(s.part(left, right))
	return nil
}

var courseColors = []color.RGBA{{31, 90, 160, 255}, {200, 80, 30, 255}, {40, 130, 60, 255}, {130, 60, 150, 255}, {90, 90, 90, 255}}
