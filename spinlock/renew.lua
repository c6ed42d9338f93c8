-- Prolongs a hold, and never shortens it.
-- KEYS: the lock
-- ARGV: the token with '~' after it, the term in ms; the owner if the hold is shared
-- Returns 1, or 0 if the token does not hold the key.
if ARGV[3] then
	-- include sharedrenew
end
local record = redis.pcall('GETRANGE', KEYS[1], '0', '1023')
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0 -- the value is no string, so the token does not hold the key
end
if string.sub(record, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
local left = redis.call('PTTL', KEYS[1])
-- A PTTL of -1 means that the key has no end, and it stays so. Replicas confirm only what was
-- written, so PEXPIRE runs even if the present term is longer.
if left ~= -1 then redis.call('PEXPIRE', KEYS[1], math.max(left, ARGV[2])) end
return 1
