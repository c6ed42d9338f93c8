-- Takes a key that is free, if no living caller waits for it. A shared hold may join a shared
-- record.
-- KEYS: see record.lua
-- ARGV[2..]: token, owner, term in ms, flags as in an entry
-- Returns what redisstore.Store.Granted decodes.

-- The usual claim is exclusive and without a fence, and its key is free and has no queue. It needs
-- none of the functions below, which Lua would create in each run. This branch writes the same
-- record as grant.lua.
if ARGV[5] == '0' and redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
	redis.call('SET', KEYS[1], 'fairlock- 0000000000000 ' .. ARGV[2] .. ' 0 ' .. ARGV[4] .. ' ' .. ARGV[3], 'PX', ARGV[4])
	return 1
end
-- include fence shared record queue grant offer handover
local mark = '-'
if redis.call('EXISTS', lock, queue) > 0 then
	local token, owner = holder()
	if not token or shared then
		-- The key may be handed over. Waiters come first.
		sweep()
		handOver('')
		token, owner = holder()
	end
	-- Refuse the claim if a holder excludes it, or if a living caller waits.
	if token and not (shared and isShared(ARGV[5])) or not passed then
		if shared then return {0, redis.call('PTTL', lock), '', look(lock, 1)[1]} end
		return {0, redis.call('PTTL', lock), owner and token .. '#' .. owner or ''}
	end
	-- All callers that are left in the queue are dead. They keep their places, in case their
	-- clients are only cut off. So the record must say that callers may wait.
	if redis.call('EXISTS', queue) == 1 then mark = '+' end
end
local fence = grant(ARGV[2], ARGV[3], ARGV[4], ARGV[5], mark)
if not fence then return {-1} end
return fence == '0' and 1 or fence
