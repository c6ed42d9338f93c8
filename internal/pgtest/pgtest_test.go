//go:build unix

package pgtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// A server that is killed leaves no process, and starts again with its data.
func TestKill(t *testing.T) {
	t.Parallel()
	s := Start(t)
	s.Must(t, "CREATE TABLE kept (n int)")
	for n := range 3 {
		s.Must(t, fmt.Sprintf("INSERT INTO kept VALUES (%d)", n))
		s.Kill()
		dirs, _ := filepath.Glob("/proc/[0-9]*/cwd")
		for _, dir := range dirs {
			if at, _ := os.Readlink(dir); at == s.data() {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
				if state, _ := stat(pid); state != "Z" {
					t.Errorf("process %d outlives its server", pid)
				}
			}
		}
		if err := s.Start(); err != nil {
			t.Fatal(err)
		}
	}
	rows, err := s.Rows(t.Context(), "SELECT n, NULL FROM kept ORDER BY n")
	if fmt.Sprint(rows) != "[0| 1| 2|]" || err != nil {
		t.Errorf("after three crashes: %v, %v", rows, err)
	}
	if err := s.Exec(t.Context(), "SELECT nonsense"); err == nil {
		t.Error("no error")
	}
}
