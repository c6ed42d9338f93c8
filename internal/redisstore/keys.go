package redisstore

import (
	"strconv"
	"strings"
	"sync"
)

// slots is how many slots a Redis cluster has.
const slots = 1 << 14

// ours is how every key begins that hasp makes up.
const ours = "hasp:{"

// LockKey returns the Redis key of the lock on key, for all strategies: key
// itself, so that strategies exclude each other, and other programs too. Only
// a key that looks like one of ours is kept under a derived name, lest a lock
// be taken for a fence.
func LockKey(key string) string {
	if strings.HasPrefix(key, ours) {
		return DerivedKey("lock", key)
	}
	return key
}

// DerivedKey returns the name of what hasp keeps beside the lock on key, such
// as its fence. It is in the cluster slot of LockKey(key), whatever bytes key
// is of. No two keys or kinds have the same name.
func DerivedKey(kind, key string) string {
	tag := tagOf(key)
	var b strings.Builder
	b.Grow(len(ours) + len(tag) + 2 + len(kind) + 1 + len(key))
	b.WriteString(ours)
	b.WriteString(tag)
	b.WriteString("}:")
	b.WriteString(kind)
	b.WriteString(":")
	b.WriteString(key)
	return b.String()
}

// tagOf returns what between braces makes for the slot of key: the part of
// key that decides it, unless that holds a brace that would end the tag; then
// the smallest number, in decimal, of that slot.
func tagOf(key string) string {
	if tag := hashed(key); tag != "" && !strings.Contains(tag, "}") {
		return tag
	}
	return numbers()[Slot(key)]
}

// numbers lists for each slot the smallest number, in decimal, that is in it.
// Processes of all versions must agree on it, since it is part of the names
// of keys.
var numbers = sync.OnceValue(func() *[slots]string {
	var all [slots]string
	for n, left := 0, slots; left > 0; n++ {
		tag := strconv.Itoa(n)
		if s := Slot(tag); all[s] == "" {
			all[s] = tag
			left--
		}
	}
	return &all
})

// hashed returns the part of a key that decides its slot: what is between the
// first "{" and the next "}", if there is anything, and else all of it
// (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).
func hashed(key string) string {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

// Slot returns the cluster slot of a Redis key, 0 to 16383.
func Slot(key string) int {
	crc := uint16(0)
	for _, b := range []byte(hashed(key)) {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return int(crc % slots)
}

// crcTable is of CRC-16/XMODEM: polynomial 0x1021, nothing reflected.
var crcTable = func() (t [256]uint16) {
	for i := range t {
		crc := uint16(i) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		t[i] = crc
	}
	return t
}()
