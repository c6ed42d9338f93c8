package filelock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/filelock"
)

// Cron may start a nightly job twice. The second job gives up. Here the two jobs are Clients in one
// process. Two processes that name the same directory behave in the same way.
func Example() {
	dir, err := os.MkdirTemp("", "locks")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)

	var job func(name string)
	job = func(name string) {
		ctx := context.Background()
		client, err := filelock.New(dir, &filelock.Options{Client: hasp.Options{Owner: name}})
		if err != nil {
			log.Fatal(err)
		}
		defer client.Close()

		err = hasp.Do(ctx, client, "nightly", func(ctx context.Context, lease *hasp.Lease) error {
			fmt.Println(name, "works")
			if name == "first" {
				job("second")
			}
			return nil
		}, hasp.WithMaxWait(0))
		if errors.Is(err, hasp.ErrHeld) {
			fmt.Println(name, "gives up")
		}
	}
	job("first")
	job("second")

	// Output:
	// first works
	// second gives up
	// second works
}
