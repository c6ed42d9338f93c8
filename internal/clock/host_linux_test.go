package clock

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// A container may have a time namespace, whose boot clock has an offset.
func TestSinceBootInATimeNamespace(t *testing.T) {
	boot, up := SinceBoot()
	if os.Getenv("HASP_NAMESPACE") != "" {
		fmt.Println(boot, int64(up))
		os.Exit(0)
	}
	cmd := exec.Command("unshare", "--time", "--boottime", "1000000", os.Args[0], "-test.run", t.Name())
	cmd.Env = append(os.Environ(), "HASP_NAMESPACE=1")
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("no time namespace can be made here: %v", err)
	}
	var other string
	var at int64
	if _, err := fmt.Sscan(string(out), &other, &at); err != nil || other != boot {
		t.Fatalf("%s: %v, want the boot %s", out, err, boot)
	}
	if later := time.Duration(at) - up; later < 0 || later > time.Hour {
		t.Errorf("the clock of the namespace is %v later", later)
	}
}
