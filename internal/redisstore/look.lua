-- This part reads shared records; shared.lua says what they are. A script that reports on a
-- key begins with it.

-- look returns up to n members of a shared record, the member with the latest end first. It leaves
-- out members whose term has ended. If the key has no shared record, it returns none.
local function look(lock, n)
	local first = redis.pcall('ZRANGE', lock, 0, 0)
	if first.err or not first[1] or not string.find(first[1], '^[%w_~-]+#') then return {} end
	if redis.call('PTTL', lock) < 0 then return {} end
	local time = redis.call('TIME')
	local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
	local found = redis.call('ZRANGE', lock, -n, -1, 'WITHSCORES')
	local members = {}
	for i = #found - 1, 1, -2 do
		-- Never leave out the member with the latest end: it holds the key while the key exists.
		if i == #found - 1 or tonumber(found[i + 1]) > now then members[#members + 1] = string.sub(found[i], 1, 1024) end
	end
	return members
end
