-- Removes whatever is stored under a key, and wakes the waiters.
-- KEYS: the lock
-- ARGV: the channel, the command that publishes
-- Returns how many keys were removed, 0 or 1.
local removed = redis.call('UNLINK', KEYS[1])
if removed == 1 then redis.pcall(ARGV[2], ARGV[1], '0') end
return removed
