package text

import (
	"encoding/json"
	"strconv"
	"testing"
	"unicode/utf8"

	"github.com/hasplock/hasp/internal/await"
)

// For any text, a terminal gets only printable text in one line, and JSON keeps its meaning.
func FuzzPlain(f *testing.F) {
	for _, s := range []string{"", "key", "\x1b[2J\x1b]0;title\x07", "\u009b2J\u009d0;x\u009c", "a\u202eb\u2066c\u200f", "a\r\nb\x00\x7f", "\xff\x9b2J\xc2", "\U0001F512\U000E0001\u2028", `\u009b`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		text := await.Value(json.Marshal(s))
		for how, shown := range map[string]string{"quote": Quote(s), "plain": Plain(s), "label": Label(s, utf8.MaxRune), "JSON": string(JSON(text))} {
			for _, r := range shown {
				if !strconv.IsPrint(r) {
					t.Fatalf("%s of %q: %q", how, s, shown)
				}
			}
			if !utf8.ValidString(shown) {
				t.Fatalf("%s of %q is no UTF-8: %q", how, s, shown)
			}
		}
		if back, err := strconv.Unquote(Quote(s)); err != nil || back != s {
			t.Errorf("quote: %q became %q, %v", s, back, err)
		}
		var one, other string
		if json.Unmarshal(text, &one) != nil || json.Unmarshal(JSON(text), &other) != nil || one != other {
			t.Errorf("JSON: %q became %q", one, other)
		}
	})
}
