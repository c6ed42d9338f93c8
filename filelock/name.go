package filelock

import (
	"crypto/sha256"
	"encoding/hex"
)

// stripes is how many stripes the keys of a directory are divided into. Each has a
// guard. The number is part of the format: two processes with different numbers
// would not exclude each other.
const stripes = 64

// maxPlain is the longest encoded key that a file name shows. So the whole name
// stays below 143 bytes, which is the smallest limit of a common file system
// (eCryptfs).
const maxPlain = 120

// stateName returns the name of key's state file. No two keys have the same name:
//
//   - A short key is encoded, so that a listing of the directory can be read. A
//     lower-case ASCII letter, a digit, "-", "_" and "." stand for themselves. Any
//     other byte, also an upper-case letter, becomes "%" and two hexadecimal
//     digits. So keys stay apart on file systems that ignore case or normalise
//     Unicode.
//   - A long key is named by its SHA-256. The record has the whole key, and load
//     compares it.
//
// Because of the prefix, no key looks like another file of the directory, the
// current directory or a device (NUL, con). Because of the suffix, the last
// character is never a dot or a space, which Windows ignores.
func stateName(key string) string {
	const digits = "0123456789abcdef"
	plain := make([]byte, 0, 2*maxPlain)
	for i := 0; i < len(key) && len(plain) <= maxPlain; i++ {
		switch c := key[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
			plain = append(plain, c)
		default:
			plain = append(plain, '%', digits[c>>4], digits[c&15])
		}
	}

	if len(plain) <= maxPlain {
		return "key-" + string(plain) + ".lock"
	}
	sum := sha256.Sum256([]byte(key))
	return "sha256-" + hex.EncodeToString(sum[:]) + ".lock"
}

// stripeOf returns the number of key's stripe.
func stripeOf(key string) int {
	sum := sha256.Sum256([]byte(key))
	return int(sum[0] % stripes)
}
