-- Releases a key, if the token holds it.
-- KEYS: the lock
-- ARGV: the token with '~' after it, and a channel if Spring's registry listens there
-- Returns 1, or 0 if the token does not hold the key.
local record = redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] - 1)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0
end
if record ~= ARGV[1] then return 0 end
-- The record is small, so UNLINK would save nothing.
redis.call('DEL', KEYS[1])
-- The key is free even if this user may not publish.
if ARGV[2] then redis.pcall('PUBLISH', ARGV[2], KEYS[1]) end
return 1
