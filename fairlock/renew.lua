-- Prolongs a hold, and never shortens it. This part follows prolong.lua.
-- KEYS: the lock
-- ARGV: the token, the term in ms
-- Returns 1, or 0 if the token does not hold the key.
local token, _, _, _, since, lasts = holder()
if token ~= ARGV[1] then return 0 end
prolong(ARGV[2], since, lasts)
return 1
