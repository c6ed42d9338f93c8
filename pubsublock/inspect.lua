-- Reads the record of a key.
-- KEYS: the lock, its fence counter
-- Returns {PTTL, start of the record's field, fence}, with '' for what does not exist. If the
-- record is shared, up to 1,000 members follow.
-- A PTTL of -2 means that the key is free, and -1 that it has no end.
local fields = redis.pcall('HLEN', KEYS[1])
-- Only a hash with one field can be a record of hasp.
local field = fields == 1 and redis.call('HKEYS', KEYS[1])[1] or ''
local fence = redis.pcall('GETRANGE', KEYS[2], 0, 16)
local found = {
	redis.call('PTTL', KEYS[1]),
	string.sub(field, 1, 1024),
	type(fence) == 'string' and fence or ''
}
if type(fields) ~= 'number' then -- the value is no hash, so it may be a shared record
	-- include look
	for _, member in ipairs(look(KEYS[1], 1000)) do found[#found + 1] = member end
end
return found
