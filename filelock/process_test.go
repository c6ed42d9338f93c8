//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/hasplock/hasp/internal/crew"
)

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"guard": holdGuard, "limited": limited, "user": user, "nobody": become})
	os.Exit(m.Run())
}

func play(t *testing.T, role, dir string, args ...string) *crew.Child {
	t.Helper()
	return crew.Test(t, role, append([]string{dir}, args...)...)
}

func holdGuard(args []string) error {
	g, err := on(args[0], nil).lockGuard(context.Background(), stripeOf(args[1]))
	if err != nil {
		return err
	}
	defer g.drop()
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin) // until this process is killed, or the test ends
	return err
}
