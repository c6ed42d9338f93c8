-- Removes whatever is stored under a key on this node, and publishes the release.
-- KEYS: the lock
-- ARGV: the channel, the message
-- Returns how many keys were removed, 0 or 1.
local removed = redis.call('DEL', KEYS[1])
if removed == 1 then redis.pcall('PUBLISH', ARGV[1], ARGV[2]) end
return removed
