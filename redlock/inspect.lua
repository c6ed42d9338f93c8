-- Reads the record of a key on this node, and its fence counter.
-- KEYS: the lock, its fence counter
-- Returns {PTTL, start of the record, fence}, with '' for what does not exist.
-- If the record is shared, up to 1,000 members follow, the longest term first.
-- A PTTL of -2 means that the key is free, and -1 that it has no end.
local function text(key, length)
	local value = redis.pcall('GETRANGE', key, 0, length - 1)
	return type(value) == 'string' and value or ''
end
local reply = {redis.call('PTTL', KEYS[1]), text(KEYS[1], 1024), text(KEYS[2], 17)}
if reply[1] < 0 or reply[2] ~= '' then return reply end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local members = redis.pcall('ZREVRANGEBYSCORE', KEYS[1], '+inf', string.format('(%.0f', now), 'LIMIT', 0, 1000)
if not members.err and members[1] and string.find(members[1], '^[%w_~-]+#') then
	for _, member in ipairs(members) do reply[#reply + 1] = member end
end
return reply
