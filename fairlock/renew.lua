-- Prolongs a hold, and never shortens it.
-- KEYS: the lock
-- ARGV: the token, the term in ms; the owner if the hold is shared
-- Returns 1, or 0 if the token does not hold the key.
if ARGV[3] then
	-- include sharedrenew
end
-- include shared record prolong
local token, _, _, _, since, lasts = holder()
if token ~= ARGV[1] then return 0 end
prolong(ARGV[2], since, lasts)
return 1
