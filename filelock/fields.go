package filelock

import (
	"strconv"
	"strings"
	"time"
)

// fields parses lines of the form "name value", in a fixed order. Each method parses the next line.
// After a line that is not as expected, the values mean nothing, and complete returns false.
type fields struct {
	rest string // the lines that are not parsed yet
	bad  bool   // some line was not as expected
}

// complete reports whether all lines were parsed and were as expected.
func (p *fields) complete() bool { return !p.bad && p.rest == "" }

// value returns the value of the next line, which must begin with the given name.
func (p *fields) value(name string) string {
	line, rest, ok := strings.Cut(p.rest, "\n")
	value, hasName := strings.CutPrefix(line, name+" ")
	p.bad = p.bad || !ok || !hasName
	p.rest = rest
	return strings.TrimRight(value, " ") // without the spaces that fill up the line
}

// text returns the value of the next line, a quoted string.
func (p *fields) text(name string) string { return parse(p, name, strconv.Unquote) }

func (p *fields) time(name string) time.Time {
	return parse(p, name, func(s string) (time.Time, error) { return time.Parse(stamp, s) })
}

func (p *fields) unsigned(name string) uint64 {
	return parse(p, name, func(s string) (uint64, error) { return strconv.ParseUint(s, 10, 64) })
}

func (p *fields) signed(name string) int64 {
	return parse(p, name, func(s string) (int64, error) { return strconv.ParseInt(s, 10, 64) })
}

// parse returns the value of the next line, converted by the function convert.
func parse[T any](p *fields, name string, convert func(string) (T, error)) T {
	v, err := convert(p.value(name))
	p.bad = p.bad || err != nil
	return v
}
