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
	// Each byte of the key takes a byte at least.
	if len(key) <= maxPlain {
		if plain := escape(key); len(plain) <= maxPlain {
			return plainPrefix + plain + suffix
		}
	}
	sum := sha256.Sum256([]byte(key))
	return sumPrefix + hex.EncodeToString(sum[:]) + suffix
}

// The parts of the names of state files.
const (
	plainPrefix = "key-"
	sumPrefix   = "sha256-"
	suffix      = ".lock"
)

// escape encodes a short key, or the beginning of one.
func escape(key string) string {
	const digits = "0123456789abcdef"
	plain := make([]byte, 0, 3*len(key))
	for _, c := range []byte(key) {
		switch {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
			plain = append(plain, c)
		default:
			plain = append(plain, '%', digits[c>>4], digits[c&15])
		}
	}
	return string(plain)
}

// stripeOf returns the number of key's stripe.
func stripeOf(key string) int {
	sum := sha256.Sum256([]byte(key))
	return int(sum[0] % stripes)
}
