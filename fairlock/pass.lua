-- Takes an entry out of the queue.
local function forget(token)
	redis.call('LREM', queue, 1, token)
	redis.call('HDEL', entries, token)
	if redis.call('EXISTS', queue) == 0 then redis.call('DEL', entries, alive) end
end
-- Reports whether the server knows of no subscriber of a channel. PUBLISH also counts subscribers by
-- pattern. SPUBLISH does not count the subscribers at a replica, although it reaches them.
local function deaf(how, channel)
	return how ~= '-' and redis.pcall('PUBSUB', how == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB', channel)[2] == 0
end
-- Offers a free key to the waiter of an entry. Returns nil if the waiter is gone, false if it receives
-- no messages and keeps its place, and otherwise what pass returns.
local function offer(token, own)
	local entry = redis.call('HGET', entries, token) or ''
	local how, channel, round, term, fenced, owner = string.match(entry, '^(%S+) (%S+) (%S+) (%S+) (%S+) (.*)$')
	local till = channel and redis.call('ZSCORE', alive, channel)
	if not till or tonumber(till) <= now() then return forget(token) end
	local mine = channel == own
	if not mine and deaf(how, channel) then return false end
	local fence = take(token, owner, term, fenced)
	local count = not mine and how ~= '-' and redis.pcall(how, channel, table.concat({token, round, fence or '-'}, ' '))
	if fence and count == 0 then redis.call('DEL', lock) return false end
	-- Without a message, which this user may have no right to publish, the waiter finds the grant at its
	-- next look, before its client counts as dead. Until then the key is reserved for it, to keep the order.
	if fence and not mine and type(count) ~= 'number' and now() + term < tonumber(till) then
		redis.pcall('PEXPIREAT', lock, string.format('%.0f', tonumber(till)))
	end
	forget(token)
	if mine then return {fence and 1 or -1, token, round, fence or '0'} end
	return fence and {} or nil
end
-- Hands a free key to the first waiter that can hear of it, from a place in the queue on, after
-- the token before it. The caller hears for its own channel: {1, token, round, fence} if the key
-- is its, {-1, token, round, 0} if there is no fence for it. {2, place, token before it} if there
-- is more to look at; else {}.
local function pass(own, place, before)
	place = tonumber(place)
	if place > 0 and redis.call('LINDEX', queue, place - 1) ~= before then place = 0 end
	for _ = 1, 32 do
		local token = redis.call('LINDEX', queue, place)
		local told = token and offer(token, own)
		if told or not token then return told or {} end
		if told == false then place, before = place + 1, token end
	end
	return {2, place, before}
end
