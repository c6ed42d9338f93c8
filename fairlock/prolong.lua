-- Prolongs a hold. This part follows record.lua.

-- Raises what is left of a hold to a term, and never shortens it. Since and lasts are the record's.
local function prolong(term, since, lasts)
	local left = redis.call('PTTL', lock)
	-- A PTTL of -1 means that the key has no end. Leave it so.
	if left == -1 then return end
	-- Run PEXPIRE even if the term is longer already, because replicas confirm only what was
	-- written.
	redis.call('PEXPIRE', lock, math.max(left, term))
	-- The start does not follow from the new PTTL, so write it into the record. A Redis without
	-- memory refuses SETRANGE if it is the first write of a script, so PEXPIRE comes first.
	if tonumber(since) == 0 then redis.pcall('SETRANGE', lock, 10, start(left, lasts)) end
end
