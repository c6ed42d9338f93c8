-- Proposes a fence for a free key: the server's time in microseconds, or one more
-- than the last fence if that is larger. Then take.lua, which follows, takes the key.
-- KEYS: the lock, its fence counter, the node's mark
-- ARGV: the record, the term in ms
-- Returns {0, mark or ''} if the key is held, {-1} if the counter's value is not a
-- number that hasp wrote, or what take.lua returns.
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, redis.call('GET', KEYS[3]) or ''} end

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
