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
func source(parts ...string) string { return redisstore.Source(scripts, parts...) }

// Lua makes the functions of a script at each run. So the usual cases come before all functions.
var (
	acquireSrc = source("acquire", "fence", "fenced")
	releaseSrc = source("free", "shared", "own", "turns", "release")
)

var (
	acquireScript = redisstore.NewScript(acquireSrc)
	leadScript    = redisstore.NewScript(source("shared", "turns", "queue") + acquireSrc)
	leaveScript   = redisstore.NewScript(source("shared", "turns", "leave"))
	renewScript   = redisstore.NewScript(source("shared", "own", "renew"))
	repairScript  = redisstore.NewScript(source("shared", "repair"))
	releaseScript = redisstore.NewScript(releaseSrc)
	inspectScript = redisstore.NewScript(source("inspect"))
	breakScript   = redisstore.NewScript(source("shared", "turns", "break"))
	markScript    = redisstore.NewScript(source("mark"))
	joinScript    = redisstore.NewScript(source("shared", "fence", "join"))
)
