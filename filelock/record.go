package filelock

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// recordHeader is the first line of a state file. It names the kind and the version of the format.
const recordHeader = "hasp filelock record 3\n"

const maxRecord = 1 << 20

// record says who holds which key, and when the term ends. A state file contains its record twice,
// as text that people can read, with a field on each line. The checksum at the end of each copy
// shows that no part is missing.
//
// A renewal overwrites the older copy, and needs no space on the disk. If it ends half-way, the
// other copy counts. That is right, because the renewal was not reported as done. A call that reads
// the file without the guard meanwhile may also see only one complete copy.
type record struct {
	key    string
	token  string
	owner  string
	pid    int           // the process that took the key, for people only
	since  time.Time     // when the key was taken
	fence  uint64        // 0 if the claim asked for none
	waited time.Duration // see backend.Claim

	change    uint64        // counts the changes of the fields below
	isMinHold bool          // the holder has released the key, which stays taken
	clock     string        // the boot whose clock counts the term: see instant
	end       time.Duration // end of the term, by that clock
	until     time.Time     // end of the term by the wall clock
}

var (
	// errTorn says that the end of a record is missing.
	errTorn = errors.New("the record is incomplete")

	errForeign = errors.New("not a record of filelock")
	errVersion = errors.New("a record of another version of filelock")
	errChanged = errors.New("the record does not match its checksum")
)

// rest returns how much of the term remains. Within one boot the boot clock decides,
// whatever happens to the wall clock. A record of another boot lasts until its end by the wall
// clock, because its holder may still run. The holder may be in a container that has an identifier
// of its own, or in a virtual machine that shares the directory against our advice.
func (r *record) rest(now instant) time.Duration {
	if r.clock != "" && r.clock == now.boot {
		return r.end - now.up
	}
	return r.until.Sub(now.wall)
}

// endIn sets the end of the term to now plus the given duration. This may shorten the term.
func (r *record) endIn(now instant, rest time.Duration) {
	// If a sum overflows, the subtraction in the method rest overflows back.
	r.clock = now.boot
	r.end = now.up + rest
	r.until = now.wall.Add(rest).UTC()
}

// status returns what Inspect and List say of the hold.
func (r *record) status(now instant) backend.Status {
	return backend.Status{
		Held:  true,
		Owner: r.owner,
		Since: r.since,
		Kept:  r.isMinHold,
		TTL:   r.rest(now),
		Fence: r.fence,
	}
}

// refusal returns the error of a caller that wants the key while the record r holds it.
func (r *record) refusal(now instant) error {
	return &backend.HeldError{
		RetryAfter: r.rest(now),
		Owner:      r.owner,
		Waited:     r.waited,
		Kept:       r.isMinHold,
	}
}

// stamp is the format of times in a record. They all have the same length, in UTC.
const stamp = "2006-01-02T15:04:05.000000000Z"

// file returns the content of a new state file.
func (r *record) file() []byte { return bytes.Repeat(r.encode(), 2) }

// encode returns one copy of the record. Its length depends only on the fields that never change,
// and not on the fence. Strings are quoted in ASCII, because a key may contain any bytes, such as a
// line feed.
func (r *record) encode() []byte {
	b := fmt.Appendf(nil, recordHeader+"key %+q\ntoken %+q\nowner %+q\n", r.key, r.token, r.owner)
	b = fmt.Appendf(b, "pid %d\nsince %s\nfence %020d\nwaited %d\n",
		r.pid, r.since.Format(stamp), r.fence, r.waited)
	b = fmt.Appendf(b, "change %020d\nkept %-5t\nclock %-36.36s\nend %020d\nuntil %s\n",
		r.change, r.isMinHold, r.clock, r.end, r.until.Format(stamp))
	return seal(b)
}

// decode returns the newer record of a state file, or the only one that is complete.
func decode(b []byte) (*record, error) {
	half := (len(b) + 1) / 2 // rounded up, so that neither half is valid if a byte was added
	first, firstErr := decodeCopy(b[:half])
	second, secondErr := decodeCopy(b[half:])
	switch {
	case firstErr == nil && secondErr == nil && first.change < second.change:
		return second, nil
	case firstErr == nil:
		return first, nil
	case secondErr == nil:
		return second, nil
	}

	// No copy is complete. Read the whole file as one copy, to find out why. Two copies read as one
	// have a wrong checksum: then return the error of the first copy. Any other error is the
	// result. If there is no error, the file ends after its first copy.
	_, wholeErr := unseal(b, recordHeader, errForeign)
	if errors.Is(wholeErr, errChanged) {
		return nil, firstErr
	}
	return nil, cmp.Or(wholeErr, errTorn)
}

// decodeCopy is the inverse of encode, and refuses all other content.
func decodeCopy(b []byte) (*record, error) {
	body, err := unseal(b, recordHeader, errForeign)
	if err != nil {
		return nil, err
	}

	// Go evaluates these calls from left to right, which is the order of the lines.
	p := fields{rest: body}
	r := &record{
		key:       p.text("key"),
		token:     p.text("token"),
		owner:     p.text("owner"),
		pid:       int(p.signed("pid")),
		since:     p.time("since"),
		fence:     p.unsigned("fence"),
		waited:    time.Duration(p.signed("waited")),
		change:    p.unsigned("change"),
		isMinHold: p.value("kept") == "true",
		clock:     p.value("clock"),
		end:       time.Duration(p.signed("end")),
		until:     p.time("until"),
	}
	if !p.complete() {
		return nil, errForeign
	}
	return r, nil
}

// seal appends the checksum, which is the last line of each record and of each stripe file.
func seal(b []byte) []byte { return append(b, sum(b)...) }

func sum(b []byte) string { return fmt.Sprintf("sum %08x\n", crc32.ChecksumIEEE(b)) }

const sumLen = len("sum 01234567\n")

// unseal returns the text between the header and the checksum. The error is errTorn if the end is
// missing or contains only zeros, because a power failure may leave such a file. It is the argument
// foreign if the header is of another kind, errVersion if only its version differs, and errChanged
// if the checksum is wrong.
func unseal(b []byte, header string, foreign error) (string, error) {
	kind := header[:strings.LastIndexByte(header, ' ')+1] // without the version
	withoutZeros := string(bytes.TrimRight(b, "\x00"))
	switch {
	case strings.HasPrefix(header, withoutZeros): // the file is empty, or ends in the header
		return "", errTorn
	case !bytes.HasPrefix(b, []byte(kind)):
		return "", foreign
	case !bytes.HasPrefix(b, []byte(header)):
		return "", errVersion
	case len(b) < len(header)+sumLen:
		return "", errTorn
	}

	body := b[:len(b)-sumLen]
	last := string(b[len(body):])
	if !strings.HasPrefix(last, "sum ") {
		return "", errTorn // the last line is not a checksum
	}
	if last != sum(body) {
		return "", errChanged
	}
	return string(body[len(header):]), nil
}
