package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestNodesTakesListsApart(t *testing.T) {
	for list, want := range map[string][]string{
		"redis://a":                         {"redis://a"},
		"redis://":                          {"redis://"},
		"redis://a:1,b:2,c:3":               {"redis://a:1", "redis://b:2", "redis://c:3"},
		"redis://a,b/7":                     {"redis://a/7", "redis://b/7"},
		"rediss://:pw@a,[::1]:7,c/0":        {"rediss://:pw@a/0", "rediss://:pw@[::1]:7/0", "rediss://:pw@c/0"},
		"redis://ann:p@,/:#w@a:1,b:2/3":     {"redis://ann:p@,/:#w@a:1/3", "redis://ann:p@,/:#w@b:2/3"},
		"unix:///run/a,b.sock":              {"unix:///run/a,b.sock"},
		"unix://ann:p%40w@/run/a,b@/c.sock": {"unix://ann:p%40w@/run/a,b@/c.sock"},
	} {
		got, err := Nodes(list)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %q, %v; want %q", list, got, err, want)
		}
		for _, node := range got {
			if _, err := Address(node); err != nil {
				t.Errorf("%s: %s: %v", list, node, err)
			}
		}
	}
}

func TestNodesRefusesWithoutTellingSecrets(t *testing.T) {
	for list, want := range map[string]string{
		"":                                   "want redis://",
		"a,b,c":                              "want redis://",
		"ann:hunter2@a,b,c":                  "want redis://",
		"http://ann:hunter2@a,b":             "want redis://",
		"redis://ann:hunter2@a,,b":           "a host is missing",
		"redis://ann:hunter2@a,b,":           "a host is missing",
		"redis://ann:hunter2@,a":             "a host is missing",
		"redis-sentinel://ann:hunter2@a,b/m": "independent servers",
		"rediss-cluster://ann:hunter2@a,b":   "independent servers",
	} {
		got, err := Nodes(list)
		if got != nil || !errors.Is(err, backend.ErrInvalid) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: got %q, %v, want ErrInvalid about %q", list, got, err, want)
		}
		if strings.Contains(fmt.Sprint(err), "hunter2") || strings.Contains(fmt.Sprint(err), "ann") {
			t.Errorf("%s: %v tells a secret", list, err)
		}
	}
}

func TestAddressIsWhereANodeIs(t *testing.T) {
	for node, want := range map[string]string{
		"redis://ann:hunter2@h":                     "h:6379",
		"redis://:hunter2@h:7/3":                    "h:7",
		"redis://":                                  "localhost:6379",
		"rediss://[::1]":                            "[::1]:6379",
		"unix://ann:hunter2@/run/redis.sock":        "/run/redis.sock",
		"redis://ann:hunter2@h:port":                "",
		"redis://ann:hunter2@a,b":                   "",
		"http://ann:hunter2@h":                      "",
		"redis://ann:hunter2@h/first?password=more": "",
	} {
		got, err := Address(node)
		if got != want || (err == nil) == (want == "") {
			t.Errorf("%s: got %q, %v; want %q", node, got, err, want)
		}
		if err != nil && (!errors.Is(err, backend.ErrInvalid) || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%s: %v", node, err)
		}
	}
}

// A node may be away when it is named, and there when it is used.
func TestPrepareAsksNobody(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true, Password: "hunter2"})
	if err := srv.Stop(); err != nil {
		t.Fatal(err)
	}
	s, probe, err := Prepare(srv.URL(), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := probe(ctx); err == nil || !strings.HasPrefix(err.Error(), s.Name()) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a node that is away: %v", err)
	}
	if err := srv.Start(true); err != nil {
		t.Fatal(err)
	}
	if err := probe(ctx); err != nil {
		t.Errorf("a node that is there again: %v", err)
	}
	if v, err := s.Do(ctx, "ping"); v != "PONG" || err != nil {
		t.Errorf("ping: %v, %v", v, err)
	}
}

func TestPrepareRefusesWhatCanNeverWork(t *testing.T) {
	for _, c := range []struct {
		node   string
		params map[string]string
	}{
		{"redis://ann:hunter2@h:port", nil},
		{"redis://ann:hunter2@h", map[string]string{"ca": "file"}},
		{"rediss://ann:hunter2@h", map[string]string{"ca": "/no/such/file"}},
	} {
		s, probe, err := Prepare(c.node, c.params, 0)
		if s != nil || probe != nil || !errors.Is(err, backend.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s %v: %v", c.node, c.params, err)
		}
	}
}
