-- Reads the record of a key.
-- KEYS: the lock, its fence counter
-- Returns {PTTL, start of the record's field, fence}, with '' for what does
-- not exist. A PTTL of -2 means that the key is free, and -1 that it has no end.
local field = redis.pcall('HLEN', KEYS[1]) == 1 and redis.call('HKEYS', KEYS[1])[1] or ''
local fence = redis.pcall('GETRANGE', KEYS[2], 0, 16)
return {redis.call('PTTL', KEYS[1]), string.sub(field, 1, 1024), type(fence) == 'string' and fence or ''}
