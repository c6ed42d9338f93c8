-- An older version kept a record in a hash, and a queue in a list and a hash. These are the parts
-- of its scripts that may hand a key over. A test runs them beside the scripts of today.
-- Reads the record of a lock. Every script that may grant the key begins with this part.
-- KEYS: the lock, its fence counter, the queue, its entries, alive-until
-- ARGV: the counter's own term in ms, and then the script's own arguments
local lock, counter, queue, entries, alive = unpack(KEYS)
local time

-- Returns the server's clock in ms.
local function now()
	time = time or redis.call('TIME')
	return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function wrongtype(reply) return string.find(reply.err, 'WRONGTYPE', 1, true) end

-- Returns token, owner and fence of the hold; true if the record is not of this strategy; or nil if
-- the key is free.
local function holder()
	local r = redis.pcall('HMGET', lock, 'token', 'owner', 'fence')
	if r.err and not wrongtype(r) then redis.call('HMGET', lock, 'token') end -- raises the error
	if r[1] then return r[1], r[2], r[3] end
	if r.err or redis.call('EXISTS', lock) == 1 then return true end
end
-- Writes the record of a lock. This part follows record.lua.

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

-- Grants a free key. Returns the fence, which is '0' if none is wanted, or nil if there can be none.
local function grant(token, owner, term, fenced)
	local fence = fenced == '0' and '0' or nextFence()
	if not fence then return end
	redis.call('HSET', lock, 'token', token, 'owner', owner, 'since', now(), 'fence', fence)
	if redis.pcall('PEXPIRE', lock, term) ~= 1 then
		-- A user that may not PEXPIRE must not leave a lock without an end.
		redis.call('DEL', lock)
		redis.call('PEXPIRE', lock, term) -- raises the error
	end
	return fence
end
-- Offers a free key to one waiter. This part follows grant.lua.

-- Takes an entry out of the queue.
local function remove(token)
	redis.call('LREM', queue, 1, token)
	redis.call('HDEL', entries, token)
	if redis.call('EXISTS', queue) == 0 then redis.call('DEL', entries, alive) end
end

-- Reports whether the server knows that a channel has no subscriber. PUBLISH also counts subscribers
-- by pattern. SPUBLISH does not count subscribers at a replica, although they get the message.
local function unsubscribed(command, channel)
	return command ~= '-' and redis.pcall('PUBSUB', command == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB', channel)[2] == 0
end

-- Returns nil if the waiter is gone, false if it gets no message and keeps its place, and otherwise
-- what handOver returns.
local function offer(token, own)
	local entry = redis.call('HGET', entries, token) or ''
	local command, channel, round, term, fenced, owner = string.match(entry, '^(%S+) (%S+) (%S+) (%S+) (%S+) (.*)$')
	local till = channel and redis.call('ZSCORE', alive, channel)
	if not till or tonumber(till) <= now() then return remove(token) end
	local mine = channel == own
	if not mine and unsubscribed(command, channel) then return false end
	local fence = grant(token, owner, term, fenced)
	local count = not mine and command ~= '-' and redis.pcall(command, channel, table.concat({token, round, fence or '-'}, ' '))
	-- A user that may not use PUBSUB learns here that the channel has no subscriber.
	if fence and count == 0 then redis.call('DEL', lock) return false end
	-- Without a message the waiter finds the grant at its next poll, before its client counts as dead.
	-- Until then the key is kept for it. Otherwise the next waiter would overtake it.
	if fence and not mine and type(count) ~= 'number' and now() + term < tonumber(till) then
		redis.pcall('PEXPIREAT', lock, string.format('%.0f', tonumber(till)))
	end
	remove(token)
	if mine then return {fence and 1 or -1, token, round, fence or '0'} end
	return fence and {} or nil
end
-- Hands a free key to the first waiter that can receive it. This part follows offer.lua.

-- Begins at a position in the queue if the entry before it is the given token, and at the head
-- otherwise. The calling client receives a key for its own channel in the reply, without a message.
-- Returns {1, token, round, fence} if the key is for the calling client, {-1, token, round, 0} if its
-- waiter cannot have a fence, {2, position, token before it} if it stopped there, and {} otherwise.
local function handOver(own, position, before)
	position = tonumber(position)
	if position > 0 and redis.call('LINDEX', queue, position - 1) ~= before then position = 0 end
	-- A script that went through a long queue of dead clients would block the server.
	for _ = 1, 32 do
		local token = redis.call('LINDEX', queue, position)
		local handed = token and offer(token, own)
		if handed or not token then return handed or {} end
		if handed == false then position, before = position + 1, token end
	end
	return {2, position, before}
end
-- Keeps places in the queue alive, and reports the state of a lock. This part follows handover.lua.

-- Extends the life of a client's places in the queue, and of the queue.
local function keepAlive(channel, window)
	local last = redis.call('ZREVRANGE', alive, 0, 0, 'WITHSCORES')[2]
	last = string.format('%.0f', math.max(now() + window, tonumber(last or 0)))
	-- If the user may not PEXPIREAT, this raises the error before alive is written.
	redis.call('PEXPIREAT', queue, last)
	redis.call('PEXPIREAT', entries, last)
	redis.call('ZADD', alive, now() + window, channel)
	redis.call('ZREMRANGEBYSCORE', alive, '-inf', now())
	redis.call('PEXPIREAT', alive, last)
end

-- Returns {1 if the asking token holds the key and otherwise 0, PTTL, 1 if the holder is of another
-- strategy, 1 if the client's channel has no subscriber, token, fence and owner of the hold, for each
-- queried token 1 if it is in the queue and otherwise 0}, followed by what handOver returned. The
-- script passes either that, if the key was free, or the holder.
local function report(asking, found, command, channel, handed, token, owner, fence)
	if handed then token, owner, fence = holder() end
	local foreign = token == true and 1 or 0
	if foreign == 1 or not token then token = '' end
	local mine = token == asking and 1 or 0
	local lost = unsubscribed(command, channel) and 1 or 0
	return {mine, redis.call('PTTL', lock), foreign, lost, token, fence or '0', owner or '', found, unpack(handed or {})}
end
