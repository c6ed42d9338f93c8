-- Takes a free key together with a fence. The text of redisstore's fence.lua comes
-- before this part.
-- KEYS: the lock, its fence counter
-- ARGV: the record, the term in ms, the counter's own term in ms
-- Returns {1, fence}; {0, PTTL, start of the record} if the key is held; or
-- {-1} if the counter's value is not a number that hasp wrote.
if redis.call('EXISTS', KEYS[1]) == 1 then
	local record = redis.pcall('GETRANGE', KEYS[1], 0, 1023)
	return {0, redis.call('PTTL', KEYS[1]), type(record) == 'string' and record or ''}
end
-- Write the counter first: if the second write is refused, no key is taken.
local fence, refused = nextFence(KEYS[2], ARGV[3])
if not fence then return refused end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence}
