-- Prolongs a hold. This part follows record.lua.

-- Raises what is left of a hold to a term, and never shortens it. Since and lasts are the record's.
local function prolong(term, since, lasts)
	local left = redis.call('PTTL', lock)
	-- A PTTL of -1 means that the key has no end. Leave it so.
	if left == -1 then return end
	-- Replicas confirm only what was written. So PEXPIRE runs even if the term is longer already.
	redis.call('PEXPIRE', lock, math.max(left, term))
	-- From here on, the start does not follow from the PTTL. Without memory, Redis refuses SETRANGE
	-- before a script has written anything, so SETRANGE comes after PEXPIRE.
	if tonumber(since) == 0 then redis.pcall('SETRANGE', lock, 10, start(left, lasts)) end
end
