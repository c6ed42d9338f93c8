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
