-- Writes a shared hold to a node that has lost it, until the hold ends elsewhere. The text
-- of shared.lua comes before this part.
-- KEYS: the lock
-- ARGV: the record, the end of the hold by this server's time in ms
-- Returns 1, or 0 if an exclusive record holds the key or the hold has ended.
-- An intent does not stop a repair, because this reader has had the key since before it.
local now = clock()
local left = tonumber(ARGV[2]) - now - 1 -- clock rounds down
if left < 1 or not readers(KEYS[1], now) then return 0 end
return enter(KEYS[1], ARGV[1], left, now) or 1
