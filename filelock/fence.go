package filelock

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// A fence is the larger of two numbers: the wall clock in microseconds, and the last fence of the
// stripe + 1. The last fence is in the file of the stripe. That file is written before the record
// that contains the fence gets its name. So fences grow across releases, expiries, kills and
// reboots, even if the clock is set back. The file is not flushed, because a flush takes many
// milliseconds. After a power failure, therefore, only the clock lets fences grow.

const fenceHeader = "hasp filelock fence 1\n"

var errFence = errors.New("not the file in which filelock keeps a stripe's last fence")

// minFence returns the smallest fence that may be given at the instant now.
func minFence(now instant) uint64 { return uint64(max(now.wall.UnixMicro(), 0)) }

// encodeFence returns the content of the file with the last fence.
func encodeFence(fence uint64) []byte {
	return seal(fmt.Appendf(nil, fenceHeader+"fence %020d\n", fence))
}

// readFence returns the last fence of a stripe from its file. If the file is torn, it returns 0, so
// that the clock alone decides. If the file is damaged or foreign in another way, it returns an
// error, because any guess might be too small.
func readFence(f *os.File) (uint64, error) {
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return 0, err
	}
	body, err := unseal(b, fenceHeader, errFence)
	if errors.Is(err, errTorn) {
		return 0, nil // a power failure has left the name without the content
	}

	p := fields{rest: body}
	last := p.unsigned("fence")
	if err == nil && !p.complete() { // err is still the error of unseal
		err = errFence
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w (its keys get no fence until this file is removed, "+
			"which is safe unless the clock was set back)", f.Name(), err)
	}
	return last, nil
}
