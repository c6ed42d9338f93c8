-- Ends a hold, if the token holds the key, leaves the key taken, and wakes the waiters,
-- which then learn the new end of the term.
-- KEYS: the lock
-- ARGV: the token and '#', the rest of the term in ms, the channel, the command that
-- publishes, and a second channel if releases are also published unsharded
-- Returns 1, or 0 if the token does not hold the key.
local fields = redis.pcall('HLEN', KEYS[1])
if type(fields) ~= 'number' then
	if not string.find(fields.err, 'WRONGTYPE', 1, true) then return fields end
	return 0
end
if fields ~= 1 then return 0 end
local field = redis.call('HKEYS', KEYS[1])[1]
if string.sub(field, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
-- No claim has the new token, so no late command finds its own. Without memory, Redis
-- refuses HSET before a script has written anything, so PEXPIRE comes first.
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[1], 'kept-' .. field, 1)
redis.call('HDEL', KEYS[1], field)
redis.pcall(ARGV[4], ARGV[3], '0')
if ARGV[5] then redis.pcall('PUBLISH', ARGV[5], '0') end
return 1
