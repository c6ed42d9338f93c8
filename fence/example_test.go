package fence_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence"
	"github.com/hasplock/hasp/fence/filefence"
	"github.com/hasplock/hasp/memlock"
)

// The file keeps what the last holder has written, although the write of an earlier one comes
// later.
func Example() {
	ctx := context.Background()
	locks, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "balance")
	write := func(ctx context.Context, balance string) error {
		return filefence.Do(ctx, path, func(context.Context) error { return os.WriteFile(path, []byte(balance), 0o600) })
	}

	first, _ := locks.Lock(ctx, "account/7", hasp.WithFence())
	late := context.WithoutCancel(first.Context())
	locks.Break(ctx, "account/7") // as if the first holder had been stopped until its term was over
	err = hasp.Do(ctx, locks, "account/7", func(ctx context.Context, _ *hasp.Lease) error {
		return write(ctx, "80")
	}, hasp.WithFence())
	fmt.Println(err)

	err = write(late, "95")
	_, stale := err.(*fence.StaleError)
	text, _ := os.ReadFile(path)
	fmt.Println(stale, string(text))
	first.Unlock(ctx) // its error is ErrLost
	// Output:
	// <nil>
	// true 80
}
