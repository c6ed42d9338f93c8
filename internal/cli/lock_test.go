//go:build unix

package cli

import (
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/redistest"
)

// A job in CI runs each step in a shell of its own. In these, hasp is "$0".
func TestLockOverSeveralShells(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, nil).URL()
	for _, url := range []string{store(t), "spinlock+" + redis, "fairlock+" + redis + "?prefix=fair:", "redlock+" + redistest.StartNodes(t, 3, nil).URL() + "?max_ttl=2m"} {
		t.Run(strings.Split(url, "+")[0][:7], func(t *testing.T) {
			at := t.TempDir() + "/lock"
			for _, step := range []string{
				`"$0" lock key --ttl 30 --fence --min-hold 1s >` + at + ` && [ $(wc -l <` + at + `) = 1 ]`,
				`"$0" lock key --ttl 1m -n; [ $? = 75 ]`,
				`{ sleep 0.2; exec "$0" lock unread --ttl 1m; } | true; "$0" run unread -n -- true`,
				`"$0" renew - --ttl 100 <` + at + ` && "$0" inspect key | grep -E "term +1m" && "$0" inspect key | grep "hasp lock"`,
				`"$0" unlock - <` + at,
				`"$0" run key --wait 1m -- true`,
				`"$0" unlock - <` + at + `; [ $? = 79 ]`,
				`"$0" renew "$(cat ` + at + `)"; [ $? = 79 ]`,
			} {
				t.Log(step)
				start(t, inShell(self(t, "hasp", url), step)).wait().want(t, 0)
			}
		})
	}
}

func TestLockSaysThatItWaits(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, nil)
	url := redisURL(t, s)
	must(t, s.Client().Set(t.Context(), t.Name()+":key", "value", 0).Err())
	runHasp(t, url, "lock", "key", "--ttl", "1m", "-w", "1.5").fails(t, exitNotAcquired,
		`waiting for "key", which has a value that is not a lock of this strategy; see hasp inspect`, "; it was not free within 1.5s\n")
}
