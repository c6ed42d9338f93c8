-- Removes whatever is stored under a key on this node, and publishes the release.
-- KEYS: the lock, the queue's turns, looks and sign
-- ARGV: the channel, the message
-- Returns how many keys were removed, 0 or 1.
local removed = redis.call('DEL', KEYS[1])
if removed == 1 then wake(KEYS[2], KEYS[3], ARGV[1], ARGV[2]) end
return removed
