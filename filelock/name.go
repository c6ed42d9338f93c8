package filelock

import (
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"strings"
)

// stripes is the number of stripes of keys in a directory. Each stripe has a guard. The number is
// part of the format: two processes with different numbers would not exclude each other.
const stripes = 64

// maxPlain is the length of the longest encoded key in a file name. The whole name therefore stays
// below 143 bytes, the smallest limit of a common file system (eCryptfs).
const maxPlain = 120

// stateName returns the name of key's state file. No two keys have the same name:
//
//   - A short key is encoded, so that people can read it. A lower-case ASCII letter, a digit, "-",
//     "_" and "." stay as they are. Any other byte becomes "%" and two hexadecimal digits. So names
//     have no upper-case and no non-ASCII letters, because some file systems ignore case or
//     normalise Unicode.
//   - The name for a long key contains the key's SHA-256. The record contains the whole key, which
//     the method load compares with the key that it looks for.
//
// Because of the prefix, no name is "." or "..", and none is the name of another file of the
// directory or of a device (NUL, con). Because of the suffix, no name ends with a dot or a space,
// which Windows ignores.
func stateName(key string) string {
	// A key that is longer than maxPlain need not be escaped, because that never makes it shorter.
	if len(key) <= maxPlain {
		if plain := escape(key); len(plain) <= maxPlain {
			return plainPrefix + plain + suffix
		}
	}
	sum := sha256.Sum256([]byte(key))
	return sumPrefix + hex.EncodeToString(sum[:]) + suffix
}

const (
	plainPrefix = "key-"
	sumPrefix   = "sha256-"
	suffix      = ".lock"
)

// escape encodes a short key, or a prefix of keys, as stateName describes.
func escape(key string) string {
	const digits = "0123456789abcdef"
	plain := make([]byte, 0, 3*len(key)) // a byte becomes up to three
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

// stripeOf returns the stripe of key. It depends on the first byte of the key's SHA-256, which the
// name of a long key's state file shows.
func stripeOf(key string) int {
	sum := sha256.Sum256([]byte(key))
	return int(sum[0] % stripes)
}

// mayBegin reports whether the file with that name may contain the record of a key that begins with
// prefix. If the key is long, the name does not show how the key begins, and mayBegin returns true.
func mayBegin(name, prefix string) bool {
	if escaped, ok := strings.CutPrefix(name, plainPrefix); ok {
		return strings.HasSuffix(name, suffix) && strings.HasPrefix(escaped, escape(prefix))
	}
	return strings.HasPrefix(name, sumPrefix) && strings.HasSuffix(name, suffix)
}

// stripeOfName returns the stripe of a key, given the name of the key's state file. The name must
// be one for which mayBegin has returned true. If no key has that name, ok is false.
func stripeOfName(name string) (stripe int, ok bool) {
	name, _ = strings.CutSuffix(name, suffix)
	if sum, ok := strings.CutPrefix(name, sumPrefix); ok {
		b, err := hex.DecodeString(sum)
		if err != nil || len(b) == 0 {
			return 0, false
		}
		return int(b[0] % stripes), true
	}

	key, err := url.PathUnescape(strings.TrimPrefix(name, plainPrefix))
	return stripeOf(key), err == nil
}
