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

// The function hashed returns the part of a key that decides the key's slot. This part is the text
// between the first "{" and the next "}", or the whole key if there is no such text
// (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).
func hashed(key string) string {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

// Tag returns a text that, in braces, puts the name of another Redis key into the slot of key. The
// text is the part of key that decides its slot. If that part is empty, or contains a closing
// brace, the text is the Number of the slot.
func Tag(key string) string {
	if tag := hashed(key); tag != "" && !strings.Contains(tag, "}") {
		return tag
	}
	return Number(Of(key))
}

// Number returns the smallest number whose decimal form is a key in the slot.
func Number(slot int) string { return numbers()[slot] }

// numbers returns the result of Number for each slot. All versions of hasp must have the same
// numbers, because the names of keys contain them.
var numbers = sync.OnceValue(func() *[Count]string {
	var all [Count]string
	// left is how many slots have no number yet
	for n, left := 0, Count; left > 0; n++ {
		tag := strconv.Itoa(n)
		if s := Of(tag); all[s] == "" {
			all[s] = tag
			left--
		}
	}
	return &all
})

// crcTable is the table of CRC-16/XMODEM: polynomial 0x1021, not reflected.
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
