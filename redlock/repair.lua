-- Writes a hold to a node that has lost it, or whose record does not count, until the hold ends
-- elsewhere. It never shortens a term. The text of clock.lua comes before this part.
-- KEYS: the lock
-- ARGV: the record, the end of the hold by this server's time in ms
-- Returns 1, or 0 if another record is in the way or the hold has ended.
local left = tonumber(ARGV[2]) - clock() - 1 -- clock rounds down
if left < 1 then return 0 end
local term = string.format('%.0f', left)
if redis.call('SET', KEYS[1], ARGV[1], 'PX', term, 'NX') then return 1 end
-- The key has a record. Prolong it if it is that of the hold.
if redis.pcall('GETRANGE', KEYS[1], 0, -1) ~= ARGV[1] then return 0 end
if redis.call('PTTL', KEYS[1]) < left then redis.call('PEXPIRE', KEYS[1], term) end
return 1
