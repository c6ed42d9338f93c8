package sqlite_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	_ "github.com/hasplock/hasp/caslock/sqlkv/sqlite"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Run(t, conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			return filepath.Join(t.TempDir(), "a #?.db"), nil, nil
		},
		Open: func(ctx context.Context, file string) (backend.Driver, error) {
			return hasp.Config{Strategy: "sqlite", Nodes: []string{file}}.Driver(ctx)
		},
	})
}

// wantError opens a URL that must fail with one line that contains each of the words.
func wantError(t *testing.T, what, url string, words ...string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, nil)
	if err == nil {
		c.Close()
		t.Errorf("%s: no error", what)
		return
	}
	text := err.Error()
	if strings.Contains(text, "\n") || strings.Contains(text, "secret") {
		t.Errorf("%s: the error has several lines or a password: %s", what, text)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: %s; want %q in it", what, text, word)
		}
	}
}

func TestSQLiteErrorsOfOpenSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	text := strings.Repeat("no database ", 999)
	await.Must(t, os.WriteFile(filepath.Join(dir, "text"), []byte(text), 0o600))
	for what, c := range map[string]struct {
		url   string
		words []string
	}{
		"no file":      {"sqlite://", []string{"sqlite:///directory/locks.db"}},
		"in memory":    {"sqlite://:memory:", []string{"a file that processes share"}},
		"no directory": {"sqlite://" + dir + "/no/locks.db", []string{dir + "/no is not a directory"}},
		"a directory":  {"sqlite://" + dir, []string{"is a directory"}},
		"other file":   {"sqlite://" + dir + "/text", []string{"no SQLite file"}},
		"parameter":    {"sqlite://" + dir + "/db?mode=ro", []string{"unknown parameter"}},
	} {
		wantError(t, what, c.url, c.words...)
	}

	t.Chdir(dir)
	c := await.Value(hasp.Open(t.Context(), "sqlite://relative.db", nil))
	await.Must(t, c.Close())
	if _, err := os.Stat(filepath.Join(dir, "relative.db")); err != nil {
		t.Error(err)
	}
}
