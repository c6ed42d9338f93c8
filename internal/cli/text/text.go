// Package text formats values for people: text of other programs, durations and numbers.
//
// Keys, owners and waiters come from a store that others write to. If hasp printed them unchanged,
// they could move the cursor, imitate a line of output, or reverse the direction of text. Quote,
// Plain and JSON return printable characters only.
package text

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// Quote returns s as a Go string in ASCII.
func Quote(s string) string { return strconv.QuoteToASCII(s) }

// Label returns s unchanged if it is one line of ordinary text with no rune greater than the
// argument last. Otherwise it returns s quoted. So the labels of different strings look different.
// Only of a string of more than 256 bytes, the label has only the beginning, quoted.
func Label(s string, last rune) string {
	if len(s) > maxLabel {
		return Quote(s[:maxLabel]) + "..."
	}
	// Spaces at the ends, or several in a row, cannot be seen in a table or on a web page.
	showsSpaces := s == strings.TrimSpace(s) && !strings.Contains(s, "  ")
	isPlain := showsSpaces && utf8.ValidString(s) && !strings.ContainsAny(s, `"\`)
	for _, c := range s {
		isPlain = isPlain && c <= last && strconv.IsPrint(c)
	}
	if isPlain {
		return s
	}
	return Quote(s)
}

const maxLabel = 256

// Plain returns s as one line of printable text. It replaces line feeds by semicolons, and other
// characters that are not printable by escapes.
func Plain(s string) string {
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

// JSON returns b, which is JSON text, in ASCII, because encoding/json does not escape control
// characters such as U+009B.
func JSON(b []byte) []byte {
	var out []byte
	for _, c := range utf16.Encode([]rune(string(b))) {
		if c < 0x7f {
			out = append(out, byte(c))
		} else {
			out = fmt.Appendf(out, `\u%04x`, c)
		}
	}
	return out
}

// Duration returns d rounded for reading: 24ms, 1.5s, 3m10s. It returns 0s for a negative d, such
// as the age of a hold whose store has another clock.
func Duration(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}
