-- Releases one shared hold. If it was the last one, the script wakes the waiters.
-- KEYS: the lock
-- ARGV: the token with '#' after it, the owner; if a release is published, the message,
-- the channel, the command that publishes
-- Returns 1, or 0 if the token does not hold the key.
-- include shared
local now = clock()
local before = redis.pcall('ZCARD', KEYS[1])
local left = readers(KEYS[1], now)
if not left then return 0 end
local member = left > 0 and find(KEYS[1], ARGV[1], ARGV[2])
if member then
	redis.call('ZREM', KEYS[1], member)
	left = left - 1
	if left > 0 then pcall(fit, KEYS[1], now) end
end
if left == 0 and before ~= 0 and ARGV[4] then
	-- The key is free even if this user may not publish.
	redis.pcall(ARGV[5], ARGV[4], ARGV[3])
end
return member and 1 or 0
