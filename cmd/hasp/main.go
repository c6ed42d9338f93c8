// Command hasp takes named locks from a shell. It runs a program under a lock,
// shows who holds a key, and demonstrates that the locks work.
//
//	hasp demo                          several processes take turns at one lock
//	hasp run backup -- ./backup.sh     like flock(1); with --url for many hosts
//	hasp lead mailer -- ./mailer       one leader among all hosts
//	hasp inspect backup                who holds the key, since when, who waits
//	hasp ls                            all keys that are held
//	hasp ui                            the held keys on a web page that updates itself
//
// A URL says where the locks are kept, as in package hasp. It comes from --url, from the file that
// --config names, or from the environment variable HASP_URL. If none of them is set, the URL is
// filelock://, which needs no server.
package main

import (
	"os"

	"github.com/hasplock/hasp/internal/cli"
)

func main() { os.Exit(cli.Main()) }
