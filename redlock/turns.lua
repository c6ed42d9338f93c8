-- Functions for the scripts that follow in the same text; clock.lua comes before
-- it. The waiters of a key stand in a queue on one node, the lead. Two sorted sets keep
-- it: when each waiter arrived, and when it last looked. A waiter that has not
-- looked for a second counts as gone.
local window = 1000

local function remove(turns, looks, waiter)
	redis.call('ZREM', turns, waiter)
	redis.call('ZREM', looks, waiter)
end

-- head returns the waiter that has waited longest, and when it arrived. It returns
-- nothing if nobody waits. It removes the waiters before it that are gone. Now is the server's
-- clock in ms, or nil if it is not known.
local function head(turns, looks, now)
	while true do
		local first = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')
		if not first[1] then return nil end
		now = now or clock()
		local looked = tonumber(redis.call('ZSCORE', looks, first[1]) or 0)
		-- A waiter is alive if its last look was within the window. If that look is in the future,
		-- the clock was set back after it, and the waiter counts as gone. But 50 ms are allowed,
		-- because clocks are often adjusted a little.
		if now - looked < window and looked <= now + 50 then return first[1], tonumber(first[2]) end
		remove(turns, looks, first[1])
	end
end

-- wake publishes to the first waiter that the key is free, and reports whether there is one. A
-- waiter is named driver~waiter, and each driver has a channel of its own. If this user may not
-- publish, waiters find the key free at their next look.
local function wake(turns, looks, channel, message)
	local ok, first = pcall(head, turns, looks)
	if not ok or not first then return false end
	redis.pcall('PUBLISH', channel .. ':' .. string.match(first, '^[^~]*'), message)
	return true
end
