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
	{
		name: "a term is counted from before the Get",
		file: "records.go",
		code: "return rs.decode(key, e, began, time.Now())",
		bug:  "return rs.decode(key, e, began, began)",
	},
	{
		name: "no read after a conflict",
		file: "records.go",
		code: "err := rs.put(ctx, v, r); !errors.Is(err, ErrConflict) {",
		bug: `err := rs.put(ctx, v, r); errors.Is(err, ErrConflict) {
			return backend.ErrHeld
		} else {`,
	},
	{
		name: "a repeated Put counts from the read",
		file: "attempt.go",
		code: "a.grant = earlier",
		bug:  "a.grant = grant(&a.claim, earlier.Fence, now)",
	},
	{
		name: "no confirming write before ErrLost",
		file: "caslock.go",
		code: "return v.next(rest, now), backend.ErrLost",
		bug: `_ = rest
			return nil, backend.ErrLost`,
	},
	{
		name: "a late answer to a renewal counts from the retry",
		file: "caslock.go",
		code: "		return writes\n	})\n	return g, err",
		bug:  "		g = grant(c, 0, now); return writes\n	})\n	return g, err",
	},
	{
		name: "a fence by the clock only",
		file: "view.go",
		code: "max(r.Write+1, uint64(now.UnixMicro()))",
		bug:  "uint64(now.UnixMicro())",
	},
	{
		name: "ErrLost for a dead hold without a write",
		file: "caslock.go",
		code: "return v.next(rest, now), backend.ErrLost",
		bug: `if find(v.rec.Items, c.Token) >= 0 {
				return nil, backend.ErrLost
			}
			return v.next(rest, now), backend.ErrLost`,
	},
	{
		name: "a renewal keeps the number of its hold",
		file: "caslock.go",
		code: "rec.add(it, max(c.TTL, it.rest(now)), now)",
		bug: `n := it.N
		rec.add(it, max(c.TTL, it.rest(now)), now)
		rec.Items[len(rec.Items)-1].N = n`,
	},
}

// TestPlantedBugs runs TestSimulation over a driver with each bug, and expects that it fails.
func TestPlantedBugs(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the test once for each bug")
	}
	for _, b := range planted {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			file := await.Value(filepath.Abs(filepath.Join("..", "..", b.file)))
			source := await.Value(os.ReadFile(file))
			if strings.Count(string(source), b.code) != 1 {
				t.Fatalf("%s does not have %q once: change the bug", b.file, b.code)
			}
			dir := t.TempDir()
			edited := filepath.Join(dir, b.file)
			overlay := filepath.Join(dir, "overlay.json")
			files, _ := json.Marshal(map[string]map[string]string{"Replace": {file: edited}})
			withBug := strings.Replace(string(source), b.code, b.bug, 1)
			await.Must(t, os.WriteFile(edited, []byte(withBug), 0o600))
			await.Must(t, os.WriteFile(overlay, files, 0o600))

			out, err := exec.Command("go", "test", "-overlay", overlay, "-vet=off", "-short",
				"-count=1", "-seeds", "2000", "-run", "^TestSimulation$", ".").CombinedOutput()
			if err == nil || !strings.Contains(string(out), "broken: ") {
				t.Errorf("not found: %v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}
