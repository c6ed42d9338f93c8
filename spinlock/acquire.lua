-- Takes a free key together with a fence: the server's time in microseconds,
-- or one more than the last fence if that is larger.
-- KEYS: the lock, its fence counter
-- ARGV: the record, the term in ms, the counter's own term in ms
-- Returns {1, fence}; {0, PTTL, start of the record} if the key is held; or
-- {-1} if the counter's value is not a number that this script wrote.
if redis.call('EXISTS', KEYS[1]) == 1 then
	local record = redis.pcall('GETRANGE', KEYS[1], 0, 1023)
	return {0, redis.call('PTTL', KEYS[1]), type(record) == 'string' and record or ''}
end
local last = redis.pcall('GETRANGE', KEYS[2], 0, 16)
if type(last) ~= 'string' then
	if not string.find(last.err, 'WRONGTYPE', 1, true) then return last end
	return {-1}
end
local now = redis.call('TIME')
local fence = tonumber(now[1]) * 1000000 + tonumber(now[2])
if last ~= '' then
	-- Above 2^53 Lua cannot count in steps of one.
	if not string.match(last, '^%d+$') or tonumber(last) > 9007199254740990 then return {-1} end
	fence = math.max(fence, tonumber(last) + 1)
end
fence = string.format('%.0f', fence)
-- Write the counter first: if the second write is refused, no key is taken.
redis.call('SET', KEYS[2], fence, 'PX', ARGV[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence}
