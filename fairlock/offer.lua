-- Offers a key to one waiter. The key is free or has a shared record. This part follows grant.lua.

-- Reports whether the server knows that a channel has no subscriber. PUBLISH also counts subscribers
-- by pattern. SPUBLISH does not count subscribers at a replica, although they get the message.
local function unsubscribed(command, channel)
	return command ~= '-' and redis.pcall('PUBSUB', command == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB', channel)[2] == 0
end

-- Returns nil if the entry is removed without a grant, false if the waiter gets no message and keeps
-- its place, and 'stop' if it waits for the end of a shared record. After a grant it returns
-- 'granted'. It adds to handed what the calling client must learn: see handOver.
local function offer(entry, own, handed)
	local token, command, channel, round, term, flags, owner = parse(entry)
	local till = token and redis.call('ZSCORE', clients, channel)
	if not till or tonumber(till) <= now() then
		redis.call('ZREM', queue, entry)
		return
	end
	local joins = isShared(flags)
	local member = token .. '#' .. owner
	if shared and joins and redis.call('ZSCORE', lock, member) then
		-- A late enqueue has queued a token that was granted the key on another entry. It may hold the
		-- key without a subscription by now, so it must not count as unsubscribed below.
		redis.call('ZREM', queue, entry)
		return
	end
	local mine = channel == own
	if not mine and unsubscribed(command, channel) then return false end
	if shared and not joins then return 'stop' end
	-- Others may wait behind this one. If none do, the mark only costs the release a command.
	local fence = grant(token, owner, term, flags, '+')
	local count = not mine and command ~= '-' and redis.pcall(command, channel, table.concat({token, round, fence or '-'}, ' '))
	-- A user that may not use PUBSUB learns here that the channel has no subscriber.
	if fence and count == 0 then
		-- Other readers keep their holds.
		if joins then quit(member) else redis.call('DEL', lock) end
		return false
	end
	-- Without a message the waiter finds the grant at its next poll, before its client counts as dead.
	-- Until then the key is kept for it. Otherwise the next waiter would overtake it.
	if fence and not mine and type(count) ~= 'number' and now() + term < tonumber(till) then
		if joins then
			enter(lock, member, till - now(), now())
		else
			redis.pcall('PEXPIREAT', lock, string.format('%.0f', tonumber(till)))
		end
	end
	redis.call('ZREM', queue, entry)
	if mine then
		for _, field in ipairs({fence and 1 or -1, token, round, fence or '0'}) do handed[#handed + 1] = field end
	end
	return fence and 'granted' or nil
end
