-- This part reads shared records; shared.lua says what they are. It writes nothing, so scripts that
-- only report on a key begin with it.

-- clock returns the server's clock in ms.
local function clock()
	local time = redis.call('TIME')
	return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- latest returns the member of a shared record whose term ends last, and this end. It returns false
-- if the key does not exist, and nil if it has another value. If the value cannot be read, it
-- returns nil and the error. A set is a shared record only if it has an end, and its last member
-- begins with a token of at least 16 characters and '#'. Otherwise it belongs to another program.
local function latest(lock)
	local last = redis.pcall('ZRANGE', lock, '-1', '-1', 'WITHSCORES')
	if last.err then
		if string.find(last.err, 'WRONGTYPE', 1, true) then return nil end
		return nil, last
	end
	if not last[1] then return false end
	local token = string.match(last[1], '^([%w_~-]+)#') or ''
	if #token < 16 or redis.call('PTTL', lock) < 0 then return nil end
	return last[1], tonumber(last[2])
end

-- members returns the members of a shared record whose term has not ended at the time now, the
-- latest end first. It leaves out members before the index first; the earliest end has the index 0,
-- and the latest -1.
local function members(lock, now, first)
	local found, all = redis.call('ZRANGE', lock, first, -1, 'WITHSCORES'), {}
	for i = #found - 1, 1, -2 do
		if tonumber(found[i + 1]) > now then all[#all + 1] = found[i] end
	end
	return all
end

-- look returns the starts of up to n members of a shared record, the latest end first. If the key
-- has no shared record, it returns none.
local function look(lock, n)
	local last, till = latest(lock)
	if not last then return {} end
	-- Never leave out the last member, because it holds the key while the key exists, even if its
	-- term ends this millisecond.
	local found = members(lock, math.min(clock(), till - 1), -n)
	for i, member in ipairs(found) do found[i] = string.sub(member, 1, 1024) end
	return found
end
