package sqlite_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
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

func TestSQLiteErrorsOfOpenSayWhatToDo(t *testing.T) {
	dir := t.TempDir()
	text := strings.Repeat("no database ", 999)
	await.Must(t, os.WriteFile(filepath.Join(dir, "text"), []byte(text), 0o600))
	for url, words := range map[string][]string{
		"sqlite://":                        {"sqlite:///directory/locks.db"},
		"sqlite://relative.db":             {"use sqlite:///relative.db"},
		"sqlite://:memory:":                {"a file that processes share"},
		"sqlite://" + dir + "/no/locks.db": {dir + "/no is not a directory"},
		"sqlite://" + dir:                  {"is a directory"},
		"sqlite://" + dir + "/db?mode=ro":  {"unknown parameter"},
	} {
		adaptertest.Invalid(t, url, words...)
	}
	adaptertest.Fails(t, "sqlite://"+dir+"/text", "no SQLite file")
}
