-- Writes a hold to a node that has lost it, until the hold ends elsewhere.
-- KEYS: the lock
-- ARGV: the record, the end of the hold by this server's time in ms
-- Returns 1, or 0 if the key is held or the hold has ended.
local now = redis.call('TIME')
local left = tonumber(ARGV[2]) - tonumber(now[1]) * 1000 - math.ceil(tonumber(now[2]) / 1000)
if left < 1 or not redis.call('SET', KEYS[1], ARGV[1], 'PX', string.format('%.0f', left), 'NX') then return 0 end
return 1
