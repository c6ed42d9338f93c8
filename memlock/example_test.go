package memlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
)

// Two Clients on one store exclude each other, as two processes would on a store that they share.
func Example() {
	ctx := context.Background()
	store := new(memlock.Store)
	a, err := hasp.New(store.Driver(), &hasp.Options{Owner: "a"})
	if err != nil {
		log.Fatal(err)
	}
	b, err := hasp.New(store.Driver(), &hasp.Options{Owner: "b"})
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	defer b.Close()

	lease, _ := a.Lock(ctx, "k")
	_, err = b.TryLock(ctx, "k")
	fmt.Println(errors.Is(err, hasp.ErrHeld))
	fmt.Println(lease.Unlock(ctx))
	// Output:
	// true
	// <nil>
}
