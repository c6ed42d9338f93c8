-- Writes the record of a lock. This part follows record.lua, and fence.lua of redisstore.
-- ARGV[1]: the counter's own term in ms
local granted -- whether the record was written

-- Removes a member of a shared record.
local function quit(member)
	shared = leave(lock, member, now())
end

-- Grants a key that is free, or whose record is given up. With flags for a shared hold, the key may
-- also have a shared record. If the token is a member of that record already, its term is
-- prolonged, and never shortened. Returns the fence, which is '0' if none is wanted, or nil if
-- there can be none.
local function grant(token, owner, term, flags, mark)
	local fence, refused = '0', nil
	if flags % 2 == 1 then fence, refused = nextFence(counter, ARGV[1]) end
	if not fence then
		-- An error of Redis ends the script. Otherwise the counter has a value that is no number.
		if refused.err then error(refused.err) end
		return
	end
	if isShared(flags) then
		refused = enter(lock, token .. '#' .. owner, term, now())
		if refused then error(refused.err) end
		shared, granted = true, true
		return fence
	end
	-- Do not read the clock only for this: see record.lua.
	local since = string.format('%013.0f', time and now() or 0)
	redis.call('SET', lock, 'fairlock' .. mark .. ' ' .. table.concat({since, token, fence, term, owner}, ' '), 'PX', term)
	granted = true
	return fence
end
