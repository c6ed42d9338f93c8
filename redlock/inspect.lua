-- Reads the record of a key on this node, and its fence counter.
-- KEYS: the lock, its fence counter
-- Returns {PTTL, start of the record, fence}, with '' for what does not exist.
-- A PTTL of -2 means that the key is free, and -1 that it has no end.
local function text(key, length)
	local value = redis.pcall('GETRANGE', key, 0, length - 1)
	return type(value) == 'string' and value or ''
end
return {redis.call('PTTL', KEYS[1]), text(KEYS[1], 1024), text(KEYS[2], 17)}
