-- Removes whatever is stored under a key, and publishes the release as Spring's
-- registry does.
-- KEYS: the lock
-- ARGV: the channel
-- Returns how many keys were removed, 0 or 1.
local removed = redis.call('UNLINK', KEYS[1])
if removed == 1 then redis.pcall('PUBLISH', ARGV[1], KEYS[1]) end
return removed
