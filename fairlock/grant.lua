-- Writes the record of a lock. This part follows record.lua.
-- ARGV[1]: the counter's own term in ms
local granted -- whether the record was written

-- Returns the next fence and stores it. Returns nil if the counter's value is not a number that
-- hasp wrote.
local function nextFence()
	local last = redis.pcall('GETRANGE', counter, 0, 16)
	if type(last) ~= 'string' then return not wrongtype(last) and redis.call('GETRANGE', counter, 0, 16) or nil end
	local fence = now() and time[1] * 1000000 + time[2]
	if last ~= '' then
		-- Above 2^53 Lua cannot count in steps of one.
		if not string.match(last, '^%d+$') or tonumber(last) > 9007199254740990 then return nil end
		fence = math.max(fence, tonumber(last) + 1)
	end
	fence = string.format('%.0f', fence)
	redis.call('SET', counter, fence, 'PX', ARGV[1])
	return fence
end

-- Removes a member of a shared record.
local function quit(member)
	redis.call('ZREM', lock, member)
	shared = redis.call('ZCARD', lock) > 0
	if shared then pcall(fit, lock, now()) end
end

-- Grants a key that is free, or whose record is given up. With flags for a shared hold, the key may
-- also have a shared record. If the token is a member of that already, its term is prolonged, and never
-- shortened. Returns the fence, which is '0' if none is wanted, or nil if there can be none.
local function grant(token, owner, term, flags, mark)
	local fence = flags % 2 == 0 and '0' or nextFence()
	if not fence then return end
	if isShared(flags) then
		local member = token .. '#' .. owner
		local refused = enter(lock, member, term, now())
		if refused then error(refused.err) end
		shared, granted = true, true
		return fence
	end
	local since = string.format('%013.0f', time and now() or 0)
	redis.call('SET', lock, 'fairlock' .. mark .. ' ' .. table.concat({since, token, fence, term, owner}, ' '), 'PX', term)
	granted = true
	return fence
end
