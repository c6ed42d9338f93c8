package redlock

import (
	_ "embed"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Each script describes its keys, arguments and reply in its header.
var (
	//go:embed turns.lua
	turnsSrc string
	//go:embed join.lua
	joinSrc string
	//go:embed own.lua
	ownSrc string
	//go:embed acquire.lua
	acquireSrc string
	//go:embed queue.lua
	queueSrc string
	//go:embed leave.lua
	leaveSrc string
	//go:embed renew.lua
	renewSrc string
	//go:embed repair.lua
	repairSrc string
	//go:embed release.lua
	releaseSrc string
	//go:embed inspect.lua
	inspectSrc string
	//go:embed break.lua
	breakSrc string
	//go:embed mark.lua
	markSrc string

	acquireScript = redisstore.NewScript(redisstore.FenceSrc + acquireSrc)
	leadScript    = redisstore.NewScript(redisstore.SharedSrc + turnsSrc + queueSrc + redisstore.FenceSrc + acquireSrc)
	leaveScript   = redisstore.NewScript(redisstore.SharedSrc + turnsSrc + leaveSrc)
	renewScript   = redisstore.NewScript(redisstore.SharedSrc + ownSrc + renewSrc)
	repairScript  = redisstore.NewScript(redisstore.SharedSrc + repairSrc)
	releaseScript = redisstore.NewScript(redisstore.SharedSrc + ownSrc + turnsSrc + releaseSrc)
	inspectScript = redisstore.NewScript(redisstore.LookSrc + inspectSrc)
	breakScript   = redisstore.NewScript(redisstore.SharedSrc + turnsSrc + breakSrc)
	markScript    = redisstore.NewScript(markSrc)
	joinScript    = redisstore.NewScript(redisstore.SharedSrc + redisstore.FenceSrc + joinSrc)
)
