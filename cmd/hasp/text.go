package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// Keys, owners and waiters come from a store that others write to. Printed as
// they are, they could move the cursor, fake a line of output or turn text
// around; quote and plain leave nothing in that is not printable.

// quote returns s as a Go string in ASCII.
func quote(s string) string { return strconv.QuoteToASCII(s) }

// plain returns s as one line of printable text.
func plain(s string) string {
	s = strings.ReplaceAll(strings.TrimSpace(s), "\n", "; ")
	var b strings.Builder
	for _, r := range s {
		if strconv.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
	}
	return b.String()
}

// plainJSON returns JSON with all escaped in it that is not printable, such as
// the control characters that are no ASCII: it may be shown on a terminal, too.
func plainJSON(text []byte) []byte {
	var out []byte
	for _, r := range string(text) {
		switch {
		case strconv.IsPrint(r) || r == '\n':
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}

// short returns d in the form people read: 24ms, 1.52s, 3m10s.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + short(-d)
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return strconv.FormatFloat(d.Seconds(), 'f', 2, 64) + "s"
	}
	return d.Round(time.Second).String()
}

// count returns "1 mouse" or "3 mice".
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}
