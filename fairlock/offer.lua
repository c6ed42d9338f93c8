-- Offers a free key to one waiter. This part follows grant.lua.

-- Reports whether the server knows that a channel has no subscriber. PUBLISH also counts subscribers
-- by pattern. SPUBLISH does not count subscribers at a replica, although they get the message.
local function unsubscribed(command, channel)
	return command ~= '-' and redis.pcall('PUBSUB', command == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB', channel)[2] == 0
end

-- Returns nil if the waiter is gone, false if it gets no message and keeps its place, and otherwise
-- what handOver returns.
local function offer(entry, own)
	local token, command, channel, round, term, fenced, owner = parse(entry)
	local till = token and redis.call('ZSCORE', clients, channel)
	if not till or tonumber(till) <= now() then
		redis.call('ZREM', queue, entry)
		return
	end
	local mine = channel == own
	if not mine and unsubscribed(command, channel) then return false end
	-- Others may wait behind this one. If none do, the mark only costs the release a command.
	local fence = grant(token, owner, term, fenced, '+')
	local count = not mine and command ~= '-' and redis.pcall(command, channel, table.concat({token, round, fence or '-'}, ' '))
	-- A user that may not use PUBSUB learns here that the channel has no subscriber.
	if fence and count == 0 then redis.call('DEL', lock) return false end
	-- Without a message the waiter finds the grant at its next poll, before its client counts as dead.
	-- Until then the key is kept for it. Otherwise the next waiter would overtake it.
	if fence and not mine and type(count) ~= 'number' and now() + term < tonumber(till) then
		redis.pcall('PEXPIREAT', lock, string.format('%.0f', tonumber(till)))
	end
	redis.call('ZREM', queue, entry)
	if mine then return {fence and 1 or -1, token, round, fence or '0'} end
	return fence and {} or nil
end
