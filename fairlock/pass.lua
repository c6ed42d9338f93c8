-- Takes an entry out of the queue.
local function forget(token)
	redis.call('LREM', queue, 1, token)
	redis.call('HDEL', entries, token)
	if redis.call('EXISTS', queue) == 0 then redis.call('DEL', entries, alive) end
end
-- Offers a free key to the waiter of an entry. Returns nil if that is gone, false if it hears
-- nothing and keeps its place, and else what pass returns.
local function offer(token, own)
	local entry = redis.call('HGET', entries, token) or ''
	local how, channel, round, term, fenced, owner = string.match(entry, '^(%S+) (%S+) (%S+) (%S+) (%S+) (.*)$')
	local till = channel and redis.call('ZSCORE', alive, channel)
	if not till or tonumber(till) <= now() then return forget(token) end
	local mine = channel == own
	-- PUBLISH counts those, too, who listen by a pattern. SPUBLISH does not count those who listen to a
	-- replica, and tells them.
	local count = how == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB'
	if how ~= '-' and not mine and redis.pcall('PUBSUB', count, channel)[2] == 0 then return false end
	local fence = take(token, owner, term, fenced)
	local heard = mine or how == '-' or redis.pcall(how, channel, table.concat({token, round, fence or '-'}, ' ')) ~= 0
	if fence and not heard then redis.call('DEL', lock) return false end
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
