-- Releases one shared hold. If it was the last one, the script wakes the waiters.
-- KEYS: the lock
-- ARGV: the token with '#' after it, the owner; if a release is published, the message,
-- the channel, the command that publishes
-- Returns 1, or 0 if the token does not hold the key.
-- include shared
local now = clock()
local before = redis.pcall('ZCARD', KEYS[1]) -- 0 if nothing is stored
if readers(KEYS[1], now) == nil then return 0 end
local member = find(KEYS[1], ARGV[1], ARGV[2], now)
-- The last holds may have ended just now, without a release. So the waiters are woken even if the
-- token holds nothing.
if not leave(KEYS[1], member or '', now) and before ~= 0 and ARGV[4] then
	-- The key is free even if this user may not publish.
	redis.pcall(ARGV[5], ARGV[4], ARGV[3])
end
return member and 1 or 0
