-- Takes a free key, with a fence if that is wanted. This part follows fence.lua of redisstore.
-- KEYS: the lock, and its fence counter if a fence is wanted
-- ARGV: the field of the record, the term in ms, the counter's own term in ms
-- Returns {1, fence}; {0, PTTL, start of the record's field} if the key is
-- held; or {-1} if the counter's value is not a number that hasp wrote.
local left = redis.call('PTTL', KEYS[1])
if left ~= -2 then
	local field = redis.pcall('HLEN', KEYS[1]) == 1 and redis.call('HKEYS', KEYS[1])[1] or ''
	return {0, left, string.sub(field, 1, 1024)}
end
local fence, refused = '', nil
if KEYS[2] then
	-- Write the counter first: if a later write is refused, no key is taken.
	fence, refused = nextFence(KEYS[2], ARGV[3])
	if not fence then return refused end
end
redis.call('HSET', KEYS[1], ARGV[1], 1)
local set = redis.pcall('PEXPIRE', KEYS[1], ARGV[2])
if set ~= 1 then
	-- A user that may not PEXPIRE must not leave a lock without an end.
	redis.call('DEL', KEYS[1])
	return set
end
return {1, fence}
