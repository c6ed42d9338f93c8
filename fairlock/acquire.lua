-- Takes a key that has no queue and is free. A shared hold may join a shared record.
-- KEYS: see record.lua
-- ARGV[2..]: token, owner, term in ms, flags as in an entry
-- Returns what redisstore.Store.Granted decodes.

-- The usual claim needs none of the functions below, which Lua would create in each run. This
-- branch writes the same record as grant.lua.
if ARGV[5] == '0' and redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
	redis.call('SET', KEYS[1], 'fairlock- 0000000000000 ' .. ARGV[2] .. ' 0 ' .. ARGV[4] .. ' ' .. ARGV[3], 'PX', ARGV[4])
	return 1
end
-- include fence shared record queue grant offer handover
if redis.call('EXISTS', lock, queue) > 0 then
	local token, owner = holder()
	if not token or shared then
		sweep()
		handOver('')
		token, owner = holder()
	end
	-- If all waiters were dead, the queue is gone now and the caller may take the key.
	if token and not (shared and isShared(ARGV[5])) or redis.call('EXISTS', queue) == 1 then
		if shared then return {0, redis.call('PTTL', lock), '', look(lock, 1)[1]} end
		return {0, redis.call('PTTL', lock), owner and token .. '#' .. owner or ''}
	end
end
local fence = grant(ARGV[2], ARGV[3], ARGV[4], ARGV[5], '-')
if not fence then return {-1} end
return fence == '0' and 1 or fence
