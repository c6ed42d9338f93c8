-- Hands a key to the first waiter that can receive it. If that waiter wants a shared hold, the
-- waiters behind it get one as well, up to the first that wants an exclusive hold. This part
-- follows offer.lua.

-- Finds the first waiter whose client has a subscription, and asks that client to poll.
local function wakeFirst()
	local position, steps = 0, 0
	while position < 32 and steps < 500 do -- so that a long queue does not block the server
		steps = steps + 1
		local entry = redis.call('LINDEX', queue, position)
		if not entry then return end
		local token, command, channel = parse(entry)
		if token and redis.call('ZSCORE', timeouts, token) then
			local count = redis.pcall(command, channel, token .. ' look')
			if type(count) == 'number' and count > 0 then return end
			position = position + 1
		else
			-- The waiter has left. Its client may still have a subscription, and would ignore the
			-- message.
			redis.call('LREM', queue, 1, entry)
		end
	end
end

-- Another program that wants the key cannot wait in the queue. Its record has left the mark mixed
-- for 2 s. Meanwhile the key is not handed over during the last 80 ms of each 250 ms of the clock,
-- so that the program finds the key free. Package line says the same to the other strategies.
local function yields()
	return redis.call('EXISTS', mixed) == 1 and now() % 250 >= 170
end

local passed -- whether handOver has reached the end of the queue: the waiters that are left are dead

-- The key must be free or have a shared record, and the variable shared must say which. The client
-- with the channel own receives a key in the reply, without a message. If handed is given, handOver
-- adds to it.
-- Returns {1, token, round, fence} for each grant to that client, and {-1, token, round, 0} for
-- each of its waiters that cannot have a fence, all in one list.
local function handOver(own, handed)
	handed = handed or {}
	if not shared and yields() then
		-- A client of a waiter must poll until the key may be handed over. If the script runs for a
		-- waiting client, own is that client's channel, and it polls anyway. Otherwise wake a
		-- client.
		if own == '' then wakeFirst() end
		return handed
	end
	local position, met = 0, 0 -- the entry to look at next, and how many places have been met
	-- Stop after 500 places, because a long queue would block the server. Entries without a place
	-- do not count, because tidy bounds their number.
	while met < 500 do
		local entry = redis.call('LINDEX', queue, position)
		local outcome = entry and offer(entry, own, handed)
		passed = not entry
		if passed or outcome == 'stop' or outcome == 'granted' and not shared then return handed end
		if outcome == 'kept' then position = position + 1 end
		if outcome ~= 'stale' then met = met + 1 end
	end
	-- The first 500 waiters could not receive the key. Have a client poll, which goes on.
	wakeFirst()
	return handed
end
