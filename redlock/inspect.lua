-- Tells who holds a key on this node.
-- KEYS: the lock, its fence counter
-- Returns {PTTL, start of the record, fence}, with '' for what there is not;
-- a PTTL of -2 means that nobody holds the key, and -1 that it has no end.
local function text(key, length)
	local value = redis.pcall('GETRANGE', key, 0, length - 1)
	return type(value) == 'string' and value or ''
end
return {redis.call('PTTL', KEYS[1]), text(KEYS[1], 1024), text(KEYS[2], 17)}
