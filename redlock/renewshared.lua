-- Prolongs a shared hold on this node, and never shortens it or prolongs another. The texts
-- of shared.lua, own.lua and counter.lua come before this part.
-- KEYS: as in renew.lua
-- ARGV: as in renew.lua, and the owner
-- Returns what renew.lua returns.
local now = clock()
local members = (readers(KEYS[1], now) or 0) > 0 and own(KEYS[1], ARGV[1], ARGV[5]) or {}
if not members[1] then return {0, marked, string.format('%.0f', now)} end
for _, member in ipairs(members) do
	local till = tonumber(redis.call('ZSCORE', KEYS[1], member))
	local refused = enter(KEYS[1], member, math.max(tonumber(ARGV[2]), till - now), now, till)
	if refused then return refused end
end
return {1, marked}
