-- This part prolongs one shared hold, and never shortens it.
-- KEYS: the lock
-- ARGV: the token with '#' after it, the term in ms, the owner
-- Returns 1, or 0 if the token does not hold the key.
-- include shared
local now = clock()
local member = readers(KEYS[1], now) and find(KEYS[1], ARGV[1], ARGV[3], now)
if not member then return 0 end
-- This returns the error of enter if there is one.
return enter(KEYS[1], member, tonumber(ARGV[2]), now) or 1
