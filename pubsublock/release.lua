-- Gives a key back, if the token holds it, and wakes those who wait for it.
-- KEYS: the lock
-- ARGV: the token and '#', the owner, the channel, the command that publishes
-- Returns 1, or 0 if the token does not hold the key.
local gone = redis.pcall('HDEL', KEYS[1], ARGV[1] .. ARGV[2])
if type(gone) ~= 'number' then
	if not string.find(gone.err, 'WRONGTYPE', 1, true) then return gone end
	return 0
end
if gone == 0 then
	-- The token is the proof, by whatever owner it was used.
	if redis.call('HLEN', KEYS[1]) ~= 1 or string.sub(redis.call('HKEYS', KEYS[1])[1], 1, #ARGV[1]) ~= ARGV[1] then return 0 end
	redis.call('DEL', KEYS[1])
end
-- The key is free whether or not this user may publish; those who are not
-- woken look for themselves.
redis.pcall(ARGV[4], ARGV[3], '0')
return 1
