package fairlock_test

import (
	"context"
	"log"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
)

// Callers of all processes take the printer in the order in which they asked for it.
func Example() {
	locks, err := hasp.Open(context.Background(), "fairlock+redis://localhost:6379/0?prefix=office:", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	err = hasp.Do(context.Background(), locks, "printer", func(ctx context.Context, lease *hasp.Lease) error {
		return printAll(ctx)
	})
	if err != nil {
		log.Print(err)
	}
}

func printAll(context.Context) error { return nil }
