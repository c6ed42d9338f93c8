package redistest

import (
	"strings"
	"testing"
)

func TestChoose(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // a PATH without redis-server
	t.Setenv(ServerEnv, "")
	for _, c := range []struct {
		asked string
		own   bool
		want  string
	}{
		{"", false, "inprocess"}, {"container", false, "inprocess"}, {"inprocess", true, "inprocess"},
		{"process", false, "!process"}, {"redis://h:1", false, "redis://h:1"}, {"redis://h:1", true, "inprocess"},
		{"docker", false, "!want"},
	} {
		got, err := choose(c.asked, c.own)
		if want, wantErr := strings.CutPrefix(c.want, "!"); wantErr {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: got %q, %v; want an error about %q", c.asked, got, err, want)
			}
		} else if got != c.want || err != nil {
			t.Errorf("%q: got %q, %v; want %q", c.asked, got, err, c.want)
		}
	}
}
