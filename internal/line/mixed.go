package line

import "time"

// A key is mixed if a program that does not use this strategy wants it as well. Such a program has
// no place in a queue and hears no message, and it may poll seldom. Beside Clients that hand the
// key on at once, it would never find the key free. So all Clients leave a mixed key alone at the
// same time, at the end of each period of the wall clock: a Client that knows the key as mixed asks
// for it only outside of this time. It may still hand a hold on to its own callers, for at most
// Fresh. The clocks of the hosts need to agree only roughly. If they do not, the other program gets
// a smaller share.
const (
	mixedFor  = 2 * time.Second // how long a key counts as mixed after a foreign record
	period    = 250 * time.Millisecond
	yieldsFor = 80 * time.Millisecond // the end of each period
)

// yieldAt returns how much longer, at the time now, Clients leave mixed keys to other programs. It is
// 0 if they do not.
func yieldAt(now time.Time) time.Duration {
	left := period - time.Duration(now.UnixNano())%period
	if left > yieldsFor {
		return 0
	}
	return left
}
