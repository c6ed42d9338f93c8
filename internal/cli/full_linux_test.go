package cli

import (
	"os"
	"testing"
)

// If hasp cannot write its output, the exit code must not be the one for a store that cannot be
// reached.
func TestFullOutputIsNoOutage(t *testing.T) {
	t.Parallel()
	url := store(t)
	defer lock(t, url, 0, "--no-wait") // hasp lock has freed the key whose handle it could not print
	for _, args := range [][]string{{"inspect", "key"}, {"inspect", "key", "--json"}, {"lock", "key", "--ttl", "1h"}, {"ls"}, {"strategies"}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		must(t, err)
		defer full.Close()
		cmd := self(t, "hasp", url, args...)
		cmd.Stdout = full
		contains(t, start(t, cmd).wait().want(t, exitFailed).err, "no space left on device")
	}
}
