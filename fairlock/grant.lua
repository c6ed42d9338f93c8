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

-- Grants a key that is free, or whose record is given up. Returns the fence, which is '0' if none is
-- wanted, or nil if there can be none.
local function grant(token, owner, term, fenced, mark)
	local fence = fenced == '0' and '0' or nextFence()
	if not fence then return end
	local since = string.format('%013.0f', time and now() or 0)
	redis.call('SET', lock, 'fairlock' .. mark .. ' ' .. table.concat({since, token, fence, term, owner}, ' '), 'PX', term)
	granted = true
	return fence
end
