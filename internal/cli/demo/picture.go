package demo

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"time"

	"github.com/hasplock/hasp/internal/cli/text"
)

//go:embed picture.tmpl
var pictureText string

var pictureTemplate = template.Must(template.New("picture").Parse(pictureText))

// Sizes of the picture, in its own units. The template has the others.
const (
	pictureLeft  = 128 // where lanes begin
	pictureRight = 1080
	lanesTop     = 92
	laneHeight   = 30
	graphHeight  = 90 // of the number's curve
)

// picture is what picture.tmpl shows: a lane for each worker, and a curve of the number
// below them. The template calls the methods.
type picture struct {
	*Demo
	Summary
	*timeline
}

// drawPicture draws the whole timeline.
func drawPicture(out io.Writer, d *Demo, t *timeline, s Summary) error {
	return pictureTemplate.Execute(out, picture{d, s, t})
}

func (p picture) Title() string {
	return text.Plain(fmt.Sprintf("hasp demo: %s, %s, one number in a file",
		text.Count(p.Demo.Workers, "process", "processes"), p.place))
}

func (p picture) Outcome() string {
	s := fmt.Sprintf("%d of %d increments are in the number", p.Number, p.Expected)
	if p.Heir > 0 {
		s += fmt.Sprintf("; worker %d was killed while it held the lock, worker %d took over %s later",
			p.Killed, p.Heir, text.Duration(p.Death.Takeover))
	}
	return s
}

// unit is a position or a length in the picture.
type unit float64

func (u unit) String() string { return fmt.Sprintf("%.1f", float64(u)) }

// X is the position of a moment.
func (p picture) X(at time.Duration) unit {
	length := max(p.End, time.Millisecond)
	return pictureLeft + (pictureRight-pictureLeft)*unit(min(at, length))/unit(length)
}

// Width is the length of a span. Even a short one can be seen.
func (p picture) Width(s span) unit { return max(p.X(s.To)-p.X(s.From), 0.8) }

// Y is the middle of a lane.
func (p picture) Y(lane int) unit { return unit(lanesTop + lane*laneHeight + laneHeight/2) }

// Level is the position of a number in the curve.
func (p picture) Level(number int) unit {
	return unit(p.Bottom()) - graphHeight*unit(number)/unit(p.Expected)
}

// Bottom is the position below the curve.
func (p picture) Bottom() int { return lanesTop + len(p.Lanes)*laneHeight + 24 + graphHeight }

func (p picture) Height() int            { return p.Bottom() + 74 }
func (p picture) Worker(lane int) int    { return lane + 1 }
func (p picture) Colour(lane int) string { return laneHex[lane%len(laneHex)] }
func (p picture) Took(s span) string     { return text.Duration(min(s.To, p.End) - s.From) }

// TookOver is when the hold of the killed worker ended.
func (p picture) TookOver() time.Duration { return p.Death.At + p.Death.Takeover }

// Ticks are round times, about ten in all.
func (p picture) Ticks() (ticks []time.Duration) {
	every := time.Millisecond
	for _, f := range []time.Duration{2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 600_000} {
		if p.End/every > 12 {
			every = f * time.Millisecond
		}
	}
	for at := time.Duration(0); at <= p.End; at += every {
		ticks = append(ticks, at)
	}
	return ticks
}
