package strategytest

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// OpenByURL proves that the parameters of a URL take effect.
func (s Strategy) OpenByURL(t *testing.T) {
	r := Setup(t, &redistest.Options{User: "ann", Password: "p@ss/w%rd?&"}, s.open)
	c := await.Value(hasp.Open(t.Context(),
		s.Name+"+"+r.Server.URL()+"?ttl=2m&prefix=app:&fence_ttl=2h", nil))
	defer c.Close()
	lease := Lock(t, c, hasp.WithFence())
	if left := r.Left(t, "app:k"); left <= time.Minute || left > 2*time.Minute {
		t.Errorf("app:k has %v left", left)
	}

	left := r.Left(t, "hasp:{app:k}:fence:app:k")
	if left <= 110*time.Minute || left > 2*time.Hour {
		t.Errorf("the counter has %v left", left)
	}

	Unlock(t, lease)
}

// OpenErrors proves that an error of Open says in one line what is wrong, without the password.
func (s Strategy) OpenErrors(t *testing.T) {
	urls := map[string][]string{
		"://":                                   {"0 nodes", s.Name + "+redis://localhost:6379"},
		"+redis://joe:hunter2@h?fence_tll=1h":   {"fence_tll", "fence_ttl"},
		"+redis://joe:hunter2@h?fence_ttl=soon": {"fence_ttl", "720h"},
		"+redis://joe:hunter2@h?fence_ttl=1us":  {"fence_ttl"},
	}

	maps.Copy(urls, s.BadURLs)
	invalid := func(what string, err error, wants []string) {
		text := fmt.Sprint(err)
		bad := strings.Contains(text, "hunter2") || strings.Contains(text, "\n")
		if !errors.Is(err, hasp.ErrInvalid) || bad {
			t.Errorf("%s: got %v", what, err)
			return
		}

		for _, want := range append(wants, "hasp: open "+s.Name+": ") {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not contain %q", err, want)
			}
		}
	}

	for url, wants := range urls {
		invalid(url, ErrOf(hasp.Open(t.Context(), s.Name+url, nil)), wants)
	}

	two := hasp.Config{Strategy: s.Name, Nodes: []string{"redis://joe:hunter2@a", "redis://b"}}
	invalid("two nodes", ErrOf(two.Open(t.Context(), nil)), []string{"2 nodes"})
}
