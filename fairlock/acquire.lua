-- Takes a key that has no queue and is free. A shared hold may join a shared record.
-- KEYS: see record.lua
-- ARGV[2..]: token, owner, term in ms, flags as in an entry
-- Returns {1, fence}; {-1} if the counter's value is not a number that hasp wrote; or, if the key is
-- held or has a queue, {0, PTTL, owner, 1 if shared and otherwise 0} and then what handOver returns.
if redis.call('EXISTS', lock, queue) > 0 then
	local handed = {}
	local token, owner = holder()
	if not token or shared then
		handed = handOver('', 0, '')
		token, owner = holder()
	end
	-- If all waiters were dead, the queue is gone now and the caller may take the key.
	if token and not (shared and isShared(ARGV[5])) or redis.call('EXISTS', queue) == 1 then
		return {0, redis.call('PTTL', lock), owner or '', shared and 1 or 0, unpack(handed)}
	end
end
local fence = grant(ARGV[2], ARGV[3], ARGV[4], ARGV[5], '-')
return fence and {1, fence} or {-1}
