-- Gives a key back, if the token holds it.
-- KEYS: the lock
-- ARGV: the token and '#'
-- Returns 1, or 0 if the token does not hold the key.
local record = redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] - 1)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0
end
if record ~= ARGV[1] then return 0 end
-- A record is too small for UNLINK to do otherwise than DEL.
return redis.call('DEL', KEYS[1])
