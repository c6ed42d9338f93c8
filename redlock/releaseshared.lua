-- Releases a shared hold on this node. If it was the last one, wakes the waiters. The texts
-- of redisstore's shared.lua, own.lua and turns.lua come before this part.
-- KEYS: the lock, the queue's turns and looks
-- ARGV: the record's prefix, as for own; the channel, or ''; the message; the owner
-- Returns 0 if the token does not hold the key, 1 if nobody is known to wait for it,
-- else a larger number.
local now = clock()
local before = redis.pcall('ZCARD', KEYS[1])
local left = readers(KEYS[1], now)
if not left then return 0 end
local members = left > 0 and own(KEYS[1], ARGV[1], ARGV[4]) or {}
for _, member in ipairs(members) do
	redis.call('ZREM', KEYS[1], member)
	left = left - 1
end
local removed = members[1] and 1 or 0
if left > 0 then
	-- The key ends with the longest of the others.
	if removed == 1 then pcall(fit, KEYS[1], now) end
	return removed
end
-- The last members may have expired just now, without a release. So the waiters are woken
-- even if this token held nothing.
if before == 0 or ARGV[2] == '' then return removed end
local waiters = wake(KEYS[2], KEYS[3], ARGV[2], ARGV[3])
return removed == 1 and 1 + waiters or 0
