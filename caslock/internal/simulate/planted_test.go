package simulate

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/await"
)

// planted are edits of the driver. Each brings back a bug that a prototype had or was tried with. The
// conformance suite has missed all but the last.
var planted = []struct{ name, file, code, bug string }{
	{"a term is counted from before the Get", "caslock.go",
		"	e, err := d.store.Get(ctx, name(key))\n	if err != nil {\n		return nil, err\n	}\n	return d.decode(key, e, time.Now())",
		"	began := time.Now()\n	e, err := d.store.Get(ctx, name(key))\n	if err != nil {\n		return nil, err\n	}\n	return d.decode(key, e, began)"},
	{"no read after a conflict", "caslock.go", "d.put(ctx, v, r); err != nil {", "d.put(ctx, v, r); errors.Is(err, ErrConflict) {\n				return backend.ErrHeld\n			} else if err != nil {"},
	{"a repeated Put counts from the read", "caslock.go", "items[i].N, at)", "items[i].N, at.Add(now.Sub(at)))"},
	{"no confirming write before ErrLost", "caslock.go", "return v.next(rest, now), backend.ErrLost", "_ = rest\n			return nil, backend.ErrLost"},
	{"a fence by the clock only", "record.go", "max(r.Write+1, uint64(now.UnixMicro()))", "uint64(now.UnixMicro())"},
	{"ErrLost for a dead hold without a write", "caslock.go", "return v.next(rest, now), backend.ErrLost", "if find(v.rec.Items, c.Token) >= 0 {\n" +
		"				return nil, backend.ErrLost\n			}\n			return v.next(rest, now), backend.ErrLost"},
	{"a renewal keeps the number of its hold", "caslock.go", "r.add(it, max(c.TTL, it.rest(now)), now)", "n := it.N\n			r.add(it, max(c.TTL, it.rest(now)), now)\n			r.Items[len(r.Items)-1].N = n"},
}

// TestPlantedBugs runs TestSimulation over a driver with each bug, and expects that it fails.
func TestPlantedBugs(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the test once for each bug")
	}
	for _, b := range planted {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			file, err := filepath.Abs(filepath.Join("..", "..", b.file))
			await.Must(t, err)
			source, err := os.ReadFile(file)
			await.Must(t, err)
			if strings.Count(string(source), b.code) != 1 {
				t.Fatalf("%s does not have %q once: change the bug", b.file, b.code)
			}
			dir := t.TempDir()
			edited, overlay := filepath.Join(dir, b.file), filepath.Join(dir, "overlay.json")
			files, _ := json.Marshal(map[string]map[string]string{"Replace": {file: edited}})
			for name, text := range map[string]string{edited: strings.Replace(string(source), b.code, b.bug, 1), overlay: string(files)} {
				await.Must(t, os.WriteFile(name, []byte(text), 0o600))
			}
			out, err := exec.Command("go", "test", "-overlay", overlay, "-vet=off", "-short", "-count=1", "-seeds", "2000", "-run", "^TestSimulation$", ".").CombinedOutput()
			if err == nil || !strings.Contains(string(out), "broken: ") {
				t.Errorf("not found: %v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}
