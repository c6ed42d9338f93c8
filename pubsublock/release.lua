-- Releases a key, if the token holds it, and wakes the waiters.
-- KEYS: the lock, and the intent if the token may have left one
-- ARGV: the token and '#', the owner, the channel, the command that publishes,
-- and a second channel if the release is also published unsharded
-- Returns 0 if the token does not hold the key, or {1, the number of connections
-- that the message has reached}.
local function publish()
	-- The key is free even if this user may not publish. Waiters that get no message
	-- retry within a second.
	local reached = redis.pcall(ARGV[4], ARGV[3], '0')
	if ARGV[5] then redis.pcall('PUBLISH', ARGV[5], '0') end
	return type(reached) == 'number' and reached or 0
end
local function lost()
	local intent = KEYS[2] and redis.pcall('GETRANGE', KEYS[2], 0, -1)
	if type(intent) == 'string' and intent .. '#' == ARGV[1] then
		-- The caller does not wait any more, so readers need not wait for it.
		redis.call('UNLINK', KEYS[2])
		publish()
	end
	return 0
end
local gone = redis.pcall('HDEL', KEYS[1], ARGV[1] .. ARGV[2])
if type(gone) ~= 'number' then
	if not string.find(gone.err, 'WRONGTYPE', 1, true) then return gone end
	return lost()
end
if gone == 0 then
	-- The token alone decides. The record may name another owner.
	if redis.call('HLEN', KEYS[1]) ~= 1 or string.sub(redis.call('HKEYS', KEYS[1])[1], 1, #ARGV[1]) ~= ARGV[1] then return lost() end
	redis.call('DEL', KEYS[1])
end
return {1, publish()}
