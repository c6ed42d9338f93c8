-- Reads the record of a key. The text of redisstore's look.lua comes before this part.
-- KEYS: the lock, and its fence counter if the fence is wanted
-- Returns {PTTL, start of the record, fence}, with '' for what does not exist or is not
-- a readable string. If the record is shared, members follow: up to 1,000, or one if no
-- fence is wanted.
-- A PTTL of -2 means that the key is free, and -1 that it has no end.
local function text(key, length)
	local value = key and redis.pcall('GETRANGE', key, 0, length - 1)
	return type(value) == 'string' and value
end
local record = text(KEYS[1], 1024)
local found = {redis.call('PTTL', KEYS[1]), record or '', text(KEYS[2], 17) or ''}
if not record then
	for _, member in ipairs(look(KEYS[1], KEYS[2] and 1000 or 1)) do found[#found + 1] = member end
end
return found
