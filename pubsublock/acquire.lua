-- Takes a free key, with a fence if that is wanted: the server's time in
-- microseconds, or one more than the last fence if that is larger.
-- KEYS: the lock, and its fence counter if a fence is wanted
-- ARGV: the field of the record, the term in ms, the counter's own term in ms
-- Returns {1, fence}; {0, PTTL, start of the record's field} if the key is
-- held; or {-1} if the counter's value is not a number that this script wrote.
local left = redis.call('PTTL', KEYS[1])
if left ~= -2 then
	local field = redis.pcall('HLEN', KEYS[1]) == 1 and redis.call('HKEYS', KEYS[1])[1] or ''
	return {0, left, string.sub(field, 1, 1024)}
end
local fence = ''
if KEYS[2] then
	local last = redis.pcall('GETRANGE', KEYS[2], 0, 16)
	if type(last) ~= 'string' then
		if not string.find(last.err, 'WRONGTYPE', 1, true) then return last end
		return {-1}
	end
	local now = redis.call('TIME')
	fence = tonumber(now[1]) * 1000000 + tonumber(now[2])
	if last ~= '' then
		-- Above 2^53 Lua cannot count in steps of one.
		if not string.match(last, '^%d+$') or tonumber(last) > 9007199254740990 then return {-1} end
		fence = math.max(fence, tonumber(last) + 1)
	end
	fence = string.format('%.0f', fence)
	-- Write the counter first: if a later write is refused, no key is taken.
	redis.call('SET', KEYS[2], fence, 'PX', ARGV[3])
end
redis.call('HSET', KEYS[1], ARGV[1], 1)
local set = redis.pcall('PEXPIRE', KEYS[1], ARGV[2])
if set ~= 1 then
	-- A user that may not PEXPIRE must not leave a lock without an end.
	redis.call('DEL', KEYS[1])
	return set
end
return {1, fence}
