package main

import (
	"strconv"
	"strings"
	"time"
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
