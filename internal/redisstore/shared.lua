-- This part handles shared records. A script that may find one begins with it.
--
-- A shared record is a sorted set under the key of the lock. Each holder has a member token#owner,
-- whose score is the end of the holder's term by the server's clock, in ms. The set's own time to
-- live ends with the latest term, so the key exists as long as the lock is held.
-- include look

-- readers returns the member of a shared record whose term ends last. It returns false if the key
-- is free or all terms have ended, and nil if the key has another value. If the value cannot be
-- read, it raises the error.
local function readers(lock, now)
	local member, till = latest(lock)
	if member then return till > now and member end
	if till then redis.call('ZRANGE', lock, '-1', '-1') end -- till is the error; raise it
	return member
end

-- expire removes from a shared record the members whose term has ended.
local function expire(lock, now)
	redis.call('ZREMRANGEBYSCORE', lock, '-inf', string.format('%.0f', now))
end

-- fit lets a shared record, which has at least one member, expire with its latest term.
local function fit(lock, now)
	local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
	redis.call('PEXPIRE', lock, string.format('%.0f', math.max(tonumber(last[2]) - now, 1)))
end

-- enter adds a member to a shared record, or prolongs its term, which is in ms from now. It never
-- shortens a term, because a request may arrive twice, or after a later one. It returns nothing, or
-- the error of PEXPIRE.
local function enter(lock, member, term, now)
	local till = tonumber(redis.call('ZSCORE', lock, member) or 0)
	local held = till > now
	-- A Redis without memory refuses ZADD, unless the script has written before. So write first if
	-- the hold is prolonged. But a new hold must be refused, so for that write later.
	if held then expire(lock, now) end
	redis.call('ZADD', lock, string.format('%.0f', math.max(now + term, till)), member)
	local ok, err = pcall(fit, lock, now)
	if not ok then
		-- A user that may not PEXPIRE must not create a record without an end. If the member is a
		-- hold that cannot be prolonged, it keeps its term.
		if held then
			redis.call('ZADD', lock, string.format('%.0f', till), member)
		else
			redis.call('ZREM', lock, member)
		end
		return type(err) == 'table' and err or {err = tostring(err)}
	end
	if not held then expire(lock, now) end
end

-- leave removes a member, and those whose term has ended, from a shared record. It returns whether
-- others hold the key.
local function leave(lock, member, now)
	redis.call('ZREM', lock, member)
	expire(lock, now)
	local held = redis.call('ZCARD', lock) > 0
	if held then pcall(fit, lock, now) end
	return held
end

-- find returns the member of a token, or nil if the token holds nothing. prefix is the token with
-- '#' after it. Usually the member is prefix and owner, and no search is needed. But the token
-- alone decides.
local function find(lock, prefix, owner, now)
	local till = redis.call('ZSCORE', lock, prefix .. owner)
	if till and tonumber(till) > now then return prefix .. owner end
	for _, member in ipairs(members(lock, now, 0)) do
		if string.sub(member, 1, #prefix) == prefix then return member end
	end
end
