//go:build unix

package cli

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSignalsReachTheWholeGroup(t *testing.T) {
	t.Parallel()
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH} {
		name := unix.SignalName(sig)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			short := strings.TrimPrefix(name, "SIG")
			p := script(t, store(t), `trap 'echo leader; exit 9' `+short+`
				 sh -c 'trap "echo child; exit" `+short+`; echo ready; while :; do sleep 0.05; done'
				 exit 1`)
			p.signal(sig)
			contains(t, p.wait().want(t, 9).out, "leader", "child")
		})
	}
}

func TestIgnoredSignalStaysIgnored(t *testing.T) {
	t.Parallel()
	cmd := self(t, "hasp", store(t))
	cmd.Args = append([]string{"sh", "-c", `trap '' HUP; exec "$0" "$@"`, cmd.Path},
		"run", "key", "--", "sh", "-c", "echo ready; cat; echo survived")
	cmd.Path = "/bin/sh"
	p := start(t, cmd)
	p.out.expect("ready")
	p.signal(unix.SIGHUP)
	contains(t, p.free().want(t, 0).out, "survived")
}
