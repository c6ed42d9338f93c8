-- Writes a hold to a node that has lost it, until the hold ends elsewhere. The text of
-- redisstore's shared.lua comes before this part.
-- KEYS: the lock
-- ARGV: the record, the end of the hold by this server's time in ms, 1 if the hold is shared
-- Returns 1, or 0 if another record is in the way or the hold has ended.
-- An intent does not stop a repair, because the reader has held the key since before the intent.
local now = clock()
local left = tonumber(ARGV[2]) - now - 1 -- clock rounds down
if left < 1 then return 0 end
if ARGV[3] then return readers(KEYS[1], now) == nil and 0 or enter(KEYS[1], ARGV[1], left, now) or 1 end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', string.format('%.0f', left), 'NX') and 1 or 0
