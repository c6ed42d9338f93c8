package filelock

import (
	"crypto/sha256"
	"encoding/hex"
)

// stripes is how many guards a directory has. It is part of the format: two
// processes that disagreed would not exclude each other.
const stripes = 64

// maxPlain is the longest encoded key that a file name shows. The whole name
// stays below 143 bytes, the shortest limit of a file system in use
// (eCryptfs).
const maxPlain = 120

// stateName is the name of the state file of key. No two keys have the same:
//
//   - A short key is written out, so that a listing of the directory can be
//     read. Lower-case ASCII letters, digits and "-_." stand for themselves,
//     every other byte, upper-case letters included, for "%" and two
//     hexadecimal digits. So a file system may ignore case, or normalise
//     Unicode, and still keep keys apart.
//   - A long key is named by its SHA-256. The record has the key in full and
//     is compared with it.
//
// The prefix keeps a key from looking like another file of the directory, the
// current directory or a device (NUL, con); the suffix keeps a dot or a space
// from being the last character, which Windows ignores.
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

// stripeOf is the number of the guard that key shares with others.
func stripeOf(key string) int {
	sum := sha256.Sum256([]byte(key))
	return int(sum[0] % stripes)
}
