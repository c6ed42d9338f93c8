-- Releases a key, if the token holds it, and hands it to the next waiter. Removes the given entries
-- from the queue. Without entries, and if the token does not hold the key, it searches for the token.
-- KEYS: see record.lua
-- ARGV[2..]: the token, and its entries that may be in the queue, if the client knows them
-- Returns {1} and what handOver returns, or {0} if the token does not hold the key.
local token, _, _, mark = holder()
local mine = token == ARGV[2]
local entries = {unpack(ARGV, 3)}
local queued = not mine and not entries[1] and redis.pcall('ZRANGE', queue, 0, -1) or {}
for _, entry in ipairs(queued) do
	if parse(entry) == ARGV[2] then entries[#entries + 1] = entry end
end
if entries[1] then queued = redis.pcall('ZREM', queue, unpack(entries)) end
if not mine then
	-- A value of another type is no queue.
	if type(queued) == 'table' and queued.err and not wrongtype(queued) then return queued end
	return {0}
end
if mark == '-' then
	redis.call('DEL', lock)
	return {1}
end
-- A grant replaces the record. If there is none, the key becomes free.
local ok, handed = pcall(handOver, '', 0, '')
if not granted then
	redis.call('DEL', lock)
	-- Without memory, Redis refuses SET until the script has deleted something.
	if not ok then ok, handed = pcall(handOver, '', 0, '') end
end
return {1, unpack(ok and handed or {})}
