-- Takes a key that nobody holds or waits for.
-- ARGV[2..]: token, owner, term in ms, whether fenced (0 or 1)
-- Returns {1, fence}; {0, PTTL, owner} and what pass says, if the key is held or waited for; or
-- {-1} if the fence counter holds what is no fence.
if redis.call('EXISTS', lock, queue) > 0 then
	local told = {}
	if not holder() then told = pass('', 0, '') end
	local token, owner = holder()
	if token or redis.call('EXISTS', queue) == 1 then
		return {0, redis.call('PTTL', lock), owner or '', unpack(told)}
	end
end
local fence = take(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
return fence and {1, fence} or {-1}
