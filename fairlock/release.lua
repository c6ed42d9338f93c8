-- Releases a key, if the token holds it, and hands it to the next waiter. Removes the given entries
-- from the queue. Without entries, and if the token does not hold the key, it searches for the token.
-- KEYS: see record.lua
-- ARGV[2..]: the token, or token#owner for a shared hold; then the token's entries that may be in the
-- queue, if the client knows them
-- Returns {1} and what handOver returns, or {0} and that if the token does not hold the key.
local token, alone, owner = string.match(ARGV[2], '^([^#]*)(#?)(.*)$')
alone = alone == ''
local has, _, _, mark = holder()
local member = not alone and shared and find(lock, token .. '#', owner)
local mine = alone and has == token or member
local entries = {unpack(ARGV, 3)}
local queued = not mine and not entries[1] and redis.pcall('ZRANGE', queue, 0, -1) or {}
for _, entry in ipairs(queued) do
	if parse(entry) == token then entries[#entries + 1] = entry end
end
if entries[1] then queued = redis.pcall('ZREM', queue, unpack(entries)) end
if not mine then
	-- A value of another type is no queue.
	if type(queued) == 'table' and queued.err and not wrongtype(queued) then return queued end
	-- The token may have waited for the end of a shared record, before others that can join it.
	local ok, handed
	if shared then ok, handed = pcall(handOver, '', 0, '') end
	return {0, unpack(ok and handed or {})}
end
if member then
	quit(member)
	-- The first waiter waits for the other holders.
	if shared then return {1} end
	local ok, handed = pcall(handOver, '', 0, '')
	return {1, unpack(ok and handed or {})}
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
