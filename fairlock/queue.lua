-- Keeps the queue. This part follows record.lua. A place is an entry of the list whose token has a
-- timeout. That is the server's time in ms until which the waiter counts as alive, and half a
-- millisecond more if its client has no subscription. A place ends with its timeout. Its entry
-- stays until it reaches the head of the list, or until most entries have no place.

-- Returns the timeout of a place as text. Till is in whole ms.
local function timeout(till, command) return string.format('%.0f', tonumber(till)) .. (command == '-' and '.5' or '') end

-- The list and the timeouts expire with the last place.
local function keepQueue()
	local last = redis.call('ZRANGE', timeouts, -1, -1, 'WITHSCORES')[2]
	if not last then return end
	last = string.format('%.0f', tonumber(last))
	redis.call('PEXPIREAT', queue, last)
	redis.call('PEXPIREAT', timeouts, last)
end

-- Removes the entries without a place, if they are more than half of all. So a place that ends
-- costs the same on average, however long the queue is.
local function tidy()
	if redis.call('LLEN', queue) <= 2 * redis.call('ZCARD', timeouts) then return end
	local entries = redis.call('LRANGE', queue, 0, -1)
	redis.call('DEL', queue)
	for _, entry in ipairs(entries) do
		local token = parse(entry)
		if token and redis.call('ZSCORE', timeouts, token) then redis.call('RPUSH', queue, entry) end
	end
	keepQueue()
end

-- Ends places whose time has passed, but not so many that the script would block the server.
local function sweep()
	local ended = redis.call('ZRANGEBYSCORE', timeouts, '-inf', string.format('%.0f', now()), 'LIMIT', 0, 500)
	if not ended[1] then return end
	redis.call('ZREM', timeouts, unpack(ended))
	tidy()
end
