-- Hands a free key to the first waiter that can receive it. This part follows offer.lua.

-- Begins at a position in the queue if the given entry is before it, and at the head otherwise. The
-- calling client receives a key for its own channel in the reply, without a message.
-- Returns {1, token, round, fence} if the key is for the calling client, {-1, token, round, 0} if its
-- waiter cannot have a fence, {2, position, entry before it} if it stopped there, and {} otherwise.
local function handOver(own, position, before)
	position = tonumber(position)
	if position > 0 and redis.call('ZRANGE', queue, position - 1, position - 1)[1] ~= before then position = 0 end
	-- A script that went through a long queue of dead clients would block the server.
	for _ = 1, 32 do
		local entry = redis.call('ZRANGE', queue, position, position)[1]
		local handed = entry and offer(entry, own)
		if handed or not entry then return handed or {} end
		if handed == false then position, before = position + 1, entry end
	end
	return {2, position, before}
end
