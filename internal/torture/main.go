// Command torture injects faults into everything that locks depend on, and checks
// whether the promises of hasp hold:
//
//	go run ./internal/torture [-strategy A,B] [-seed N] [-time 60s] [-on STORE] [-faults REGEXP] [-plant BUG]
//
// Client processes lock, use a resource that refuses an old fence, and unlock.
// Meanwhile processes are killed and stopped, connections cut and stalled, replies
// lost, requests delivered late, servers stopped, restarted and filled up, and
// clocks set. Then torture checks the history:
//
//   - No two callers hold a key at once, unless both hold it shared. A caller holds it from the return of Lock
//     to the call of Unlock or the end of the lease, whichever is first.
//   - At most as many slots of a key are held at once as it has, each by one caller.
//   - No lease is lost before its end, and fences grow.
//   - Every key and every slot is granted after every fault, and at the end to every waiter.
//   - Nothing is left: no keys, queue entries or subscriptions on the servers, and
//     no goroutines or descriptors in the clients.
//   - No client uses more and more of the machine.
//
// Then it does the same with faults that take locks away, such as FLUSHALL. Then
// only the fence protects.
//
// The seed decides which faults happen, in which order and for how long, and
// what the clients do. It does not decide the exact timing. The exit status is 1
// if a promise was broken, a run stood still, or a planted bug was not found. It is 2 if
// torture itself failed, and 130 if a signal ended it.
package main

import (
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/torture/rig"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

func main() {
	rig.Main(rig.Program{Command: "go run ./internal/torture", Package: "github.com/hasplock/hasp/internal/torture"})
}
