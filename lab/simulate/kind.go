package main

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Kind is a kind of store.
type Kind struct {
	Name string // the value of the flag -kind
	Open func(t *testing.T, r *rand.Rand) Store

	SameFences bool // two shared holds may have the same fence

	// Fast says by which part the store's clock is faster than the clock of the Clients. If Fast is
	// zero, the seed decides on a part that is less than backend.Drift allows for.
	Fast float64
}

// Store is what the Clients of a world share.
type Store interface {
	// Link returns a driver for a new Client, and the Client's link to the store.
	Link(r *rand.Rand, timeout time.Duration) (backend.Driver, Link)

	// Strike makes a fault happen now. The caller must not add a link during the call. Strike
	// returns the function that ends the fault, or nil if there is nothing to end. If the store
	// loses its holds, Strike calls the function forgot.
	Strike(r *rand.Rand, forgot func()) (heal func())

	// Heal ends all faults that the functions returned by Strike do not end.
	Heal()

	// Skip lets the duration d pass in the store, while no time passes for the Clients.
	Skip(d time.Duration)

	// Longest returns the longest term that callers may ask for.
	Longest() time.Duration

	// Left returns the records of locks that are still in the store.
	Left() []string
}

// Link is one Client's link to the store.
type Link interface {
	// Silence stops everything on the link, without an error, until the function heal is called.
	Silence() (heal func())
}

// Quorum is a Store that can lose the majority of its servers.
type Quorum interface {
	Store

	// Majority stops the answers of the store to all Clients until the function heal is called.
	Majority(r *rand.Rand) (heal func())
}

// Robber is a Store that can take a key away from its holder. The holder learns of the loss at its
// next renewal.
type Robber interface {
	Store
	Rob(r *rand.Rand, key string)
}
