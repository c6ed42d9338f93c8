package redlock

import (
	"embed"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Each script describes its keys, arguments and reply in its header.
//
//go:embed *.lua
var scripts embed.FS

// source returns the text of some parts of a script.
func source(parts ...string) (text string) {
	for _, part := range parts {
		src, err := scripts.ReadFile(part + ".lua")
		if err != nil {
			panic(err)
		}
		text += string(src)
	}
	return text
}

// Lua makes the functions of a script at each run. So the usual cases come before all functions.
var (
	acquireSrc = source("acquire") + redisstore.FenceSrc + source("fenced")
	releaseSrc = source("free") + redisstore.SharedSrc + source("own", "turns", "release")
)

var (
	acquireScript = redisstore.NewScript(acquireSrc)
	leadScript    = redisstore.NewScript(redisstore.SharedSrc + source("turns", "queue") + acquireSrc)
	leaveScript   = redisstore.NewScript(redisstore.SharedSrc + source("turns", "leave"))
	renewScript   = redisstore.NewScript(redisstore.SharedSrc + source("own", "renew"))
	repairScript  = redisstore.NewScript(redisstore.SharedSrc + source("repair"))
	releaseScript = redisstore.NewScript(releaseSrc)
	inspectScript = redisstore.NewScript(redisstore.LookSrc + redisstore.InspectSrc)
	breakScript   = redisstore.NewScript(redisstore.SharedSrc + source("turns", "break"))
	markScript    = redisstore.NewScript(source("mark"))
	joinScript    = redisstore.NewScript(redisstore.SharedSrc + redisstore.FenceSrc + source("join"))
)
