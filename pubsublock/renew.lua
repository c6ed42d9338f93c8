-- Prolongs a hold, and never shortens it.
-- KEYS: the lock
-- ARGV: the token and '#', the term in ms; the owner if the hold is shared
-- Returns 1, or 0 if the token does not hold the key.
if ARGV[3] then
	-- include sharedrenew
end
local fields = redis.pcall('HLEN', KEYS[1])
if type(fields) ~= 'number' then
	if not string.find(fields.err, 'WRONGTYPE', 1, true) then return fields end
	return 0 -- the value is no hash, so the token does not hold the key
end
-- A record of hasp has one field, which begins with the token.
if fields ~= 1 or string.sub(redis.call('HKEYS', KEYS[1])[1], 1, #ARGV[1]) ~= ARGV[1] then
	return 0
end
local left = redis.call('PTTL', KEYS[1])
-- A PTTL of -1 means that the key has no end, and it stays so. Replicas confirm only what was
-- written, so PEXPIRE runs even if the present term is longer.
if left ~= -1 then redis.call('PEXPIRE', KEYS[1], math.max(left, ARGV[2])) end
return 1
