-- This part handles shared records. A script that may find one begins with it.
--
-- A shared record is a sorted set under the key of the lock. Each holder has a member token#owner,
-- whose score is the end of the holder's term by the server's clock, in ms. The set's own time to
-- live ends with the latest term, so the key exists as long as the lock is held.

-- clock returns the server's clock in ms.
local function clock()
	local time = redis.call('TIME')
	return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- readers removes from a shared record the members whose term has ended, and returns how many are
-- left. It returns 0 if the key is free, and nil if the key has another value. A set is a shared
-- record only if it has an end and its first member begins with a token and '#'.
local function readers(lock, now)
	local first = redis.pcall('ZRANGE', lock, '0', '0')
	if first.err then
		if not string.find(first.err, 'WRONGTYPE', 1, true) then redis.call('ZRANGE', lock, 0, 0) end -- raises the error
		return nil
	end
	if not first[1] then return 0 end
	if redis.call('PTTL', lock) < 0 or not string.find(first[1], '^[%w_~-]+#') then return nil end
	redis.call('ZREMRANGEBYSCORE', lock, '-inf', string.format('%.0f', now))
	return redis.call('ZCARD', lock)
end

-- fit lets a shared record, which has at least one member, expire with its latest term.
local function fit(lock, now)
	local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
	redis.call('PEXPIRE', lock, string.format('%.0f', math.max(tonumber(last[2]) - now, 1)))
end

-- enter gives a member a term in ms. It never shortens a term, because a request may arrive twice,
-- or after a later one. It returns nothing, or the error of PEXPIRE.
local function enter(lock, member, term, now)
	local till = tonumber(redis.call('ZSCORE', lock, member) or '')
	redis.call('ZADD', lock, string.format('%.0f', math.max(now + term, till or 0)), member)
	local ok, err = pcall(fit, lock, now)
	if not ok then
		-- A user that may not PEXPIRE must not create a record without an end. If the member is a
		-- hold that cannot be prolonged, it keeps its term.
		if till then
			redis.call('ZADD', lock, string.format('%.0f', till), member)
		else
			redis.call('ZREM', lock, member)
		end
		return type(err) == 'table' and err or {err = tostring(err)}
	end
end

-- find returns the member of a token, or nil if the record has none. prefix is the token with '#'
-- after it. Usually the member has this owner, and no search is needed.
local function find(lock, prefix, owner)
	if redis.call('ZSCORE', lock, prefix .. owner) then return prefix .. owner end
	for _, member in ipairs(redis.call('ZRANGE', lock, 0, -1)) do
		if string.sub(member, 1, #prefix) == prefix then return member end
	end
end
