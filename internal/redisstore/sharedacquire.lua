-- Takes a key shared, if it is free or has a shared record, and there is no intent.
-- KEYS: the lock, the intent of a caller that waits, and the fence counter if a fence is wanted
-- ARGV: the member, the term in ms, the counter's own term in ms
-- Returns what Store.Granted decodes. If there is an intent, its PTTL is returned.
-- include shared
local now = clock()
if readers(KEYS[1], now) == nil then -- another value holds the key: a string, or Redisson's hash
	local record = redis.pcall('GETRANGE', KEYS[1], 0, 1023)
	if type(record) ~= 'string' then
		record = redis.pcall('HLEN', KEYS[1]) == 1 and redis.call('HKEYS', KEYS[1])[1] or ''
	end
	return {0, redis.call('PTTL', KEYS[1]), string.sub(record, 1, 1024)}
end
local waits = redis.call('PTTL', KEYS[2]) -- -2 if there is no intent
if waits ~= -2 then return {0, waits, ''} end

local fence, refused
if KEYS[3] then
	-- include fence
	-- Write the counter first, so that the key is not taken if Redis refuses one of the writes.
	fence, refused = nextFence(KEYS[3], ARGV[3])
	if not fence then return refused end
end
-- This returns the error of enter if there is one.
return enter(KEYS[1], ARGV[1], tonumber(ARGV[2]), now) or fence or 1
