// Package slot computes the slot of a key in a Redis cluster.
package slot

import (
	"strconv"
	"strings"
	"sync"
)

// Count is how many slots a Redis cluster has.
const Count = 1 << 14

// Of returns the cluster slot of a Redis key, 0 to 16383.
func Of(key string) int {
	crc := uint16(0)
	for _, b := range []byte(hashed(key)) {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return int(crc % Count)
}

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

// Tag returns what between braces makes for the slot of key: the part of
// key that decides it, unless that holds a brace that would end the tag; then
// the smallest number, in decimal, of that slot.
func Tag(key string) string {
	if tag := hashed(key); tag != "" && !strings.Contains(tag, "}") {
		return tag
	}
	return Number(Of(key))
}

// Number returns the smallest number, in decimal, that is in a slot.
func Number(slot int) string { return numbers()[slot] }

// numbers lists for each slot the smallest number, in decimal, that is in it.
// Processes of all versions must agree on it, since it is part of the names
// of keys.
var numbers = sync.OnceValue(func() *[Count]string {
	var all [Count]string
	for n, left := 0, Count; left > 0; n++ {
		tag := strconv.Itoa(n)
		if s := Of(tag); all[s] == "" {
			all[s] = tag
			left--
		}
	}
	return &all
})

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
