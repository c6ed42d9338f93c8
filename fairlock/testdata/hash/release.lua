-- Releases a key, if the token holds it, and hands it to the next waiter. Otherwise it removes the
-- token from the queue.
-- KEYS: see record.lua
-- ARGV[2]: the token
-- Returns {1} and what handOver returns, or {0} if the token does not hold the key.
if holder() ~= ARGV[2] then
	if redis.call('HEXISTS', entries, ARGV[2]) == 1 then remove(ARGV[2]) end
	return {0}
end
redis.call('DEL', lock)
-- If the hand-over fails, such as for lack of memory, the key stays free.
local ok, handed = pcall(handOver, '', 0, '')
return {1, unpack(ok and handed or {})}
