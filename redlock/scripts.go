package redlock

import (
	"embed"

	"github.com/hasplock/hasp/internal/redisstore"
)

// scripts contains the Lua scripts. The header of each script describes its keys, arguments and
// reply.
//
//go:embed *.lua
var scripts embed.FS

// source returns the text of a script that consists of the given parts.
func source(parts ...string) string { return redisstore.Source(scripts, parts...) }

var (
	acquireScript = redisstore.NewScript(source("acquire"))
	leadScript    = redisstore.NewScript(source("clock", "turns", "queue", "acquire"))
	leaveScript   = redisstore.NewScript(source("clock", "turns", "leave"))
	renewScript   = redisstore.NewScript(source("clock", "own", "renew"))
	repairScript  = redisstore.NewScript(source("clock", "repair"))
	releaseScript = redisstore.NewScript(source("release"))
	inspectScript = redisstore.NewScript(source("inspect"))
	breakScript   = redisstore.NewScript(source("clock", "turns", "break"))
	markScript    = redisstore.NewScript(source("clock", "mark"))
)
