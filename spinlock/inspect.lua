-- Reads the record of a key.
-- KEYS: the lock, and its fence counter if the fence is wanted
-- Returns {PTTL, start of the record, fence}, with '' for what does not exist or is not
-- a readable string.
-- A PTTL of -2 means that the key is free, and -1 that it has no end.
local function text(key, length)
	local value = key and redis.pcall('GETRANGE', key, 0, length - 1)
	return type(value) == 'string' and value or ''
end
return {redis.call('PTTL', KEYS[1]), text(KEYS[1], 1024), text(KEYS[2], 17)}
