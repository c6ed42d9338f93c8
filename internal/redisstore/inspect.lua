-- Reads the record of a key.
-- KEYS: the lock, its fence counter
-- ARGV: how many members of a shared record follow at most; by default 1,000
-- Returns {PTTL, start of the record, fence}, with '' for a value that does not exist or is not a
-- readable string. If the record is shared, its members follow.
-- A PTTL of -2 means that the key is free, and -1 that it has no end.

-- text returns the start of a string, '' if the key does not exist, or false if it is no readable
-- string.
local function text(key, length)
	local value = redis.pcall('GETRANGE', key, 0, length - 1)
	return type(value) == 'string' and value
end

local record = text(KEYS[1], 1024)
local found = {redis.call('PTTL', KEYS[1]), record or '', text(KEYS[2], 17) or ''}
if not record then -- it may be shared
	-- include look
	for _, member in ipairs(look(KEYS[1], tonumber(ARGV[1] or 1000))) do
		found[#found + 1] = member
	end
end
return found
