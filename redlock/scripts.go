package redlock

import (
	_ "embed"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Each script describes its keys, arguments and reply in its header.
var (
	//go:embed turns.lua
	turnsSrc string
	//go:embed alone.lua
	aloneSrc string
	//go:embed share.lua
	shareSrc string
	//go:embed join.lua
	joinSrc string
	//go:embed own.lua
	ownSrc string
	//go:embed counter.lua
	counterSrc string
	//go:embed renewshared.lua
	renewSharedSrc string
	//go:embed releaseshared.lua
	releaseSharedSrc string
	//go:embed repairshared.lua
	repairSharedSrc string
	//go:embed acquire.lua
	acquireSrc string
	//go:embed take.lua
	takeSrc string
	//go:embed queue.lua
	queueSrc string
	//go:embed leave.lua
	leaveSrc string
	//go:embed raise.lua
	raiseSrc string
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

	acquireScript = redisstore.NewScript(aloneSrc + acquireSrc + takeSrc)
	leadScript    = redisstore.NewScript(aloneSrc + turnsSrc + queueSrc + takeSrc)
	leadFenced    = redisstore.NewScript(aloneSrc + turnsSrc + queueSrc + acquireSrc + takeSrc)
	leaveScript   = redisstore.NewScript(turnsSrc + leaveSrc)
	raiseScript   = redisstore.NewScript(raiseSrc)
	renewScript   = redisstore.NewScript(counterSrc + renewSrc)
	repairScript  = redisstore.NewScript(repairSrc)
	releaseScript = redisstore.NewScript(turnsSrc + releaseSrc)
	inspectScript = redisstore.NewScript(redisstore.LookSrc + inspectSrc)
	breakScript   = redisstore.NewScript(turnsSrc + breakSrc)
	markScript    = redisstore.NewScript(markSrc)

	shares = redisstore.SharedSrc + shareSrc
	own    = redisstore.SharedSrc + ownSrc

	joinScript          = redisstore.NewScript(shares + joinSrc)
	joinFenced          = redisstore.NewScript(shares + acquireSrc + joinSrc)
	leadJoin            = redisstore.NewScript(shares + turnsSrc + queueSrc + joinSrc)
	leadJoinFenced      = redisstore.NewScript(shares + turnsSrc + queueSrc + acquireSrc + joinSrc)
	renewSharedScript   = redisstore.NewScript(own + counterSrc + renewSharedSrc)
	repairSharedScript  = redisstore.NewScript(redisstore.SharedSrc + repairSharedSrc)
	releaseSharedScript = redisstore.NewScript(own + turnsSrc + releaseSharedSrc)
)
