-- Refuses a key on the lead if it is held, or if another caller has waited longer. A
-- refused waiter gets a place in the queue, or keeps the one it has. A waiter that is not
-- refused leaves the queue, and acquire.lua follows. The texts of clock.lua and turns.lua come
-- before this part.
-- KEYS: the lock, its fence counter, the node's mark, the queue's turns and looks, the sign that
-- callers wait
-- ARGV: the record, the term in ms, '' without a fence, the waiter or '', how long it has waited
-- in ms
-- Returns {0, mark or '', what the queue says}, or what acquire.lua returns.
-- If no other caller has waited longer, the queue says 1. If another caller has waited longer, it
-- says 2 if the key is free, and otherwise 0.
-- First means that no other caller has waited longer.
local waiter, held, first = ARGV[4], redis.call('EXISTS', KEYS[1]) == 1, true

-- Ignore errors, because the order is not guaranteed. If this user may not keep a queue, or if
-- another value has one of the queue's keys, callers take the lock in any order.
pcall(function()
	local now = clock()
	local arrived = now - tonumber(ARGV[5])
	local ahead, since = head(KEYS[4], KEYS[5], now)
	first = not ahead or ahead == waiter or arrived < since

	if waiter == '' then return end -- this caller does not queue
	if first and not held then
		remove(KEYS[4], KEYS[5], waiter)
		return
	end
	redis.call('ZADD', KEYS[5], now, waiter)
	local new = redis.call('ZADD', KEYS[4], 'NX', arrived, waiter) == 1
	-- A look of the first waiter, or of a new one, prolongs the queue. The others need not, because
	-- if the first waiter dies, the next one becomes the first before the queue expires.
	if not first and not new then return end
	redis.call('PEXPIRE', KEYS[5], 2 * window)
	redis.call('PEXPIRE', KEYS[4], 2 * window)
	redis.call('SET', KEYS[6], '1', 'PX', 2 * window) -- so that a release need not read the sets
end)
if held or not first then
	local says = held and 0 or 2
	return {0, redis.call('GET', KEYS[3]) or '', first and 1 or says}
end
