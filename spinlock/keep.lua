-- Ends a hold, if the token holds the key, and leaves the key taken.
-- KEYS: the lock
-- ARGV: the token with '~' after it, the rest of the term in ms
-- Returns 1, or 0 if the token does not hold the key.
local record = redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] - 1)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0
end
if record ~= ARGV[1] then return 0 end
-- No claim has the new token, so no late command finds its own. Without memory, Redis
-- refuses SET before a script has written anything, so PEXPIRE comes first.
record = redis.call('GETRANGE', KEYS[1], 0, -1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], 'kept-' .. record, 'PX', ARGV[2])
return 1
