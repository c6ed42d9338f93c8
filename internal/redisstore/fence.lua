-- This part makes fences. A script that takes a fenced hold begins with it.

-- propose returns the next fence as text, and writes nothing. The fence is the server's time in
-- microseconds, or one more than the last fence if that is larger. If no fence is possible, propose
-- returns nil and the reply that the script must return. That is {-1} if the counter's value is not
-- a number that hasp wrote, and otherwise the error of GETRANGE.
local function propose(counter)
	local last = redis.pcall('GETRANGE', counter, '0', '16')
	if type(last) ~= 'string' then
		if not string.find(last.err, 'WRONGTYPE', 1, true) then return nil, last end
		return nil, {-1} -- the counter is not a string
	end
	local now = redis.call('TIME')
	local fence = tonumber(now[1]) * 1000000 + tonumber(now[2])
	if last ~= '' then
		-- Above 2^53 Lua cannot count in steps of one.
		if not string.match(last, '^%d+$') or tonumber(last) > 9007199254740990 then
			return nil, {-1}
		end
		fence = math.max(fence, tonumber(last) + 1)
	end
	return string.format('%.0f', fence)
end

-- nextFence returns what propose returns. If that is a fence, it stores it in counter for ttl ms.
local function nextFence(counter, ttl)
	local fence, refused = propose(counter)
	if fence then redis.call('SET', counter, fence, 'PX', ttl) end
	return fence, refused
end
