-- Hands a key to the first waiter that can receive it. If that one shares the key, the next ones that
-- share it get it too, up to the first that does not. This part follows offer.lua.

-- Begins at a position in the queue if the given entry is before it, and at the head otherwise. The
-- key must be free or have a shared record, and holder or the caller has set shared. The calling client
-- receives a key for its own channel in the reply, without a message. Adds to handed, if given.
-- Returns {1, token, round, fence} for each grant to the calling client, and {-1, token, round, 0} for
-- each of its waiters that cannot have a fence, all in one list. If it stopped within the queue, the list
-- ends with {2, position, entry before it}.
local function handOver(own, position, before, handed)
	handed = handed or {}
	position = tonumber(position)
	if position > 0 and redis.call('ZRANGE', queue, position - 1, position - 1)[1] ~= before then position = 0 end
	-- A script that went through a long queue would block the server.
	for _ = 1, 32 do
		local entry = redis.call('ZRANGE', queue, position, position)[1]
		local outcome = entry and offer(entry, own, handed)
		if not entry or outcome == 'stop' or outcome == 'granted' and not shared then return handed end
		if outcome == false then position, before = position + 1, entry end
	end
	for _, field in ipairs({2, position, before}) do handed[#handed + 1] = field end
	return handed
end
