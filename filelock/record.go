package filelock

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"time"
)

// recordHeader is the first line of a state file: what it is, and the version
// of its format.
const recordHeader = "hasp filelock record 1\n"

// maxRecord bounds what is read of a state file, which may be anything.
const maxRecord = 1 << 20

// record is what a state file says: who holds which key until when. It is
// text that people can read, one field a line, closed by a checksum, so that
// a file of which a part is missing is never taken for a shorter whole.
type record struct {
	key   string
	token string
	owner string
	pid   int // of who took it; for people only
	since time.Time
	fence uint64
	clock string        // the boot clock that counts the term
	end   time.Duration // of the term, by that clock
	until time.Time     // of the term, by the wall clock
}

var (
	// errTorn is a record of which the end is missing.
	errTorn = errors.New("the record is incomplete")

	errForeign = errors.New("not a record of filelock")
	errVersion = errors.New("a record of another version of filelock")
	errChanged = errors.New("the record does not match its checksum")
)

// left is how much of the term is left. The boot clock decides within the
// boot it belongs to, whatever happens to the wall clock. A record of another
// boot lasts until its end by the wall clock, although its holder is surely
// gone if it ran on this host: containers may have boot clocks that differ,
// and virtual machines may share the directory against our advice.
func (r *record) left(now instant) time.Duration {
	if r.clock != "" && r.clock == now.clock {
		return r.end - now.up
	}
	return r.until.Sub(now.wall)
}

// extend makes the term last at least ttl from now, and reports whether that
// changed anything.
func (r *record) extend(now instant, ttl time.Duration) bool {
	if r.left(now) >= ttl {
		return false
	}
	// A sum beyond the clock's range wraps round, and back again in left.
	r.clock, r.end, r.until = now.clock, now.up+ttl, now.wall.Add(ttl).UTC()
	return true
}

// encode is the content of the state file. Strings are quoted and in ASCII,
// since a key may hold any bytes, such as a line feed or an escape sequence.
func (r *record) encode() []byte {
	b := fmt.Appendf(nil, recordHeader+"key %+q\ntoken %+q\nowner %+q\npid %d\nsince %s\nfence %d\nclock %+q\nend %d\nuntil %s\n",
		r.key, r.token, r.owner, r.pid, r.since.Format(time.RFC3339Nano), r.fence, r.clock, r.end, r.until.Format(time.RFC3339Nano))
	return seal(b)
}

// decode is the reverse of encode, and takes nothing else.
func decode(b []byte) (*record, error) {
	body, err := unseal(b, recordHeader, errForeign)
	if err != nil {
		return nil, err
	}
	var r record
	p := fields{rest: body}
	p.text("key", &r.key)
	p.text("token", &r.token)
	p.text("owner", &r.owner)
	p.number("pid", func(s string) (err error) { r.pid, err = strconv.Atoi(s); return })
	p.time("since", &r.since)
	p.unsigned("fence", &r.fence)
	p.text("clock", &r.clock)
	p.number("end", func(s string) error { n, err := strconv.ParseInt(s, 10, 64); r.end = time.Duration(n); return err })
	p.time("until", &r.until)
	if p.bad || p.rest != "" {
		return nil, errForeign
	}
	return &r, nil
}

// seal appends the line that closes a file of ours.
func seal(b []byte) []byte {
	return fmt.Appendf(b, "sum %08x\n", crc32.ChecksumIEEE(b))
}

// sumLen is the length of the line that seal appends.
const sumLen = len("sum 01234567\n")

// unseal returns what stands between header and checksum. What is cut short,
// as a power failure may leave it, is errTorn; so is a file of zeros, which
// some file systems make of data that was never written out.
func unseal(b []byte, header string, foreign error) (string, error) {
	kind := header[:strings.LastIndexByte(header, ' ')+1]
	switch {
	case strings.HasPrefix(header, string(bytes.TrimRight(b, "\x00"))):
		return "", errTorn
	case !bytes.HasPrefix(b, []byte(kind)):
		return "", foreign
	case !bytes.HasPrefix(b, []byte(header)):
		return "", errVersion
	case len(b) < len(header)+sumLen || !strings.HasPrefix(string(b[len(b)-sumLen:]), "sum "):
		return "", errTorn
	}
	body := b[:len(b)-sumLen]
	if !bytes.Equal(seal(bytes.Clone(body)), b) {
		return "", errChanged
	}
	return string(body[len(header):]), nil
}

// fields takes lines of the form "name value" apart, in their one order.
type fields struct {
	rest string
	bad  bool
}

func (p *fields) next(name string) string {
	line, rest, ok := strings.Cut(p.rest, "\n")
	value, named := strings.CutPrefix(line, name+" ")
	if !ok || !named {
		p.bad = true
	}
	p.rest = rest
	return value
}

func (p *fields) text(name string, into *string) {
	s, err := strconv.Unquote(p.next(name))
	*into, p.bad = s, p.bad || err != nil
}

func (p *fields) time(name string, into *time.Time) {
	t, err := time.Parse(time.RFC3339Nano, p.next(name))
	*into, p.bad = t, p.bad || err != nil
}

func (p *fields) unsigned(name string, into *uint64) {
	p.number(name, func(s string) (err error) { *into, err = strconv.ParseUint(s, 10, 64); return })
}

func (p *fields) number(name string, parse func(string) error) {
	if parse(p.next(name)) != nil {
		p.bad = true
	}
}
