-- Offers a key to one waiter. The key is free or has a shared record. This part follows grant.lua.

-- Reports whether the server knows that a channel has no subscriber. PUBLISH also counts
-- subscribers by pattern. SPUBLISH does not count subscribers at a replica, although they get the
-- message.
local function unsubscribed(command, channel)
	if command == '-' then return false end
	local count = redis.pcall('PUBSUB', command == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB', channel)[2]
	-- If the user may not use PUBSUB, count by an empty message, which clients ignore. Do not count
	-- by the message about the grant: a subscriber at a replica may read it although the count is
	-- 0, so the grant could not be taken back.
	return (count or redis.pcall(command, channel, '')) == 0
end

-- Removes a place.
local function remove(entry, token)
	redis.call('LREM', queue, 1, entry)
	redis.call('ZREM', timeouts, token)
end

-- Returns 'stale' if the entry has no place, 'removed' if its place is removed without a grant,
-- 'kept' if the waiter gets no message and keeps its place, 'stop' if the waiter must wait for the
-- end of a shared record, and 'granted'. It adds to handed what the calling client must learn: see
-- handOver.
local function offer(entry, own, handed)
	local token, command, channel, round, term, flags, owner = parse(entry)
	local till = token and redis.call('ZSCORE', timeouts, token)
	if not till then
		redis.call('LREM', queue, 1, entry)
		return 'stale'
	end
	-- Most releases do not read the clock. Polls remove the places whose time has passed.
	if time and tonumber(till) <= now() then
		remove(entry, token)
		return 'removed'
	end
	-- A silent waiter has no subscription, and polls: see timeout in queue.lua.
	local mine, joins, silent = channel == own, isShared(flags), string.find(till, '.5', 1, true)
	-- A waiter whose client has lost its subscription is dead, unless it never had one.
	if not mine and not silent and unsubscribed(command, channel) then return 'kept' end
	if shared and not joins then return 'stop' end
	-- Others may wait behind this one, so the record gets the mark +. If none do, the release runs
	-- one needless command.
	local fence = grant(token, owner, term, flags, '+')
	local count = not mine and redis.pcall(command, channel, table.concat({token, round, fence or '-'}, ' '))
	-- If the waiter gets no message, it finds the grant at its next poll, before its place would
	-- have ended. Raise the term of the hold to that time. Otherwise the hold could end before, and
	-- the next waiter would overtake this one.
	if fence and not mine and (silent or type(count) ~= 'number') and now() + term < tonumber(till) then
		if joins then
			enter(lock, token .. '#' .. owner, till - now(), now())
		else
			redis.pcall('PEXPIREAT', lock, string.format('%.0f', tonumber(till)))
		end
	end
	remove(entry, token)
	if mine then
		for _, field in ipairs({fence and 1 or -1, token, round, fence or '0'}) do handed[#handed + 1] = field end
	end
	return fence and 'granted' or 'removed'
end
