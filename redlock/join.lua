-- Takes the key shared, if it is free or has a shared record, and there is no intent. The
-- texts of redisstore's shared.lua and fence.lua come before this part.
-- KEYS: the lock, its fence counter, the node's mark, the intent of a caller that waits, the sign
-- that callers wait
-- ARGV: the record, the term in ms, the counter's own term in ms or '' without a fence, '' if the
-- caller does not wait
-- Returns {0, mark or ''} if the key is held; {0, mark or '', the rest of the intent in ms} if
-- a caller waits; {-1} if the counter's value is not a number that hasp wrote; or {1, fence
-- or 0, mark or '', INFO server}.
local now = clock()
-- Read the mark first: if GET fails, the script ends and takes nothing.
local mark = redis.call('GET', KEYS[3]) or ''
local joins, intent = readers(KEYS[1], now), redis.call('PTTL', KEYS[4])
if joins == nil or intent ~= -2 then
	-- Readers do not queue, but a release publishes only if the sign exists.
	if ARGV[4] ~= '' then redis.pcall('SET', KEYS[5], '1', 'PX', '2000') end
	return joins == nil and {0, mark} or {0, mark, math.max(intent, 1)}
end

local fence, refused = '0', nil
if ARGV[3] ~= '' then
	-- Write the counter first: if a later write is refused, no key is taken.
	fence, refused = nextFence(KEYS[2], ARGV[3])
	if not fence then return refused end
end
refused = enter(KEYS[1], ARGV[1], tonumber(ARGV[2]), now)
if refused then return refused end
return {1, fence, mark, redis.call('INFO', 'server')}
