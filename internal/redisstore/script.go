package redisstore

import (
	"crypto/sha1"
	"embed"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Reply is the reply to one command, or its error.
type Reply = resp.Reply

// Script is a Lua script. A Store usually sends only its hash. It sends the source until a call of
// Run has succeeded, and when a server does not know the script.
type Script struct {
	src     string
	sha     string // the hash of src
	confirm bool   // see Store.Send
}

//go:embed *.lua
var parts embed.FS

// Source joins the named parts of a script. A part is a file of the strategy, or a file of this
// package that strategies share. The line "-- include NAME" is replaced by the part NAME. In each
// run, Lua creates the functions of the parts that the run reaches. Therefore a script includes a
// part where it first needs the part, and a usual run creates no function. A usual run also passes
// only texts to Redis, because numbers would have to be formatted.
func Source(files embed.FS, names ...string) string {
	var text strings.Builder
	for _, name := range names {
		src, err := files.ReadFile(name + ".lua")
		if err != nil { // the strategy has no such file, so the part is shared
			src, err = parts.ReadFile(name + ".lua")
		}
		if err != nil {
			panic(err)
		}
		for line := range strings.Lines(string(src)) {
			if others, ok := strings.CutPrefix(strings.TrimSpace(line), "-- include "); ok {
				line = Source(files, strings.Fields(others)...)
			}
			text.WriteString(line)
		}
	}

	return text.String()
}

// NewScript returns a script with the source src.
func NewScript(src string) *Script {
	sum := sha1.Sum([]byte(src))
	return &Script{src: src, sha: hex.EncodeToString(sum[:])}
}

// NewHold returns a script that takes or extends a hold, so replicas must confirm the hold (see the
// parameter confirm of [Store.Send]).
func NewHold(src string) *Script {
	sc := NewScript(src)
	sc.confirm = true
	return sc
}

// Call holds the arguments for one run of a script. There is at least one key, and all keys are in
// the same cluster slot.
type Call struct {
	Keys []string
	Args []string
}

// appendArgs appends the command that runs s. If whole is true, the command contains the source,
// and otherwise the hash.
func (s *Script) appendArgs(all []string, c Call, whole bool) []string {
	if whole {
		all = append(all, "eval", s.src)
	} else {
		all = append(all, "evalsha", s.sha)
	}
	all = append(all, strconv.Itoa(len(c.Keys)))
	return append(append(all, c.Keys...), c.Args...)
}

// unknownScript begins the reply of a server that does not know a script. After this reply, the
// script may be sent again, because it has not run.
const unknownScript = "NOSCRIPT"
