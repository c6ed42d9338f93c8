-- Queues a token, or grants it the key if the key is free and has no queue. A shared hold may join
-- a shared record.
-- KEYS: see record.lua
-- ARGV[2..]: the entry, whole term in ms, window in ms, the time until which an earlier call has
-- kept the client's places (0 if the client needs a full report), the entry's command (- if the
-- client has no subscription)
-- Returns what report returns.
-- include fence shared record queue grant offer handover prolong report
local entry, whole, window, till, command = unpack(ARGV, 2, 6)
local token, _, channel, round, term, flags, owner = parse(entry)
local has, whose, fence, mark, since, lasts = holder()
if has == token then
	prolong(whole, since, lasts)
	return report(token, '', command, channel, nil, has, whose, fence)
end
if shared and find(lock, token .. '#', owner, now()) then
	-- The reply or the message about the grant was lost, with its fence. A new fence is as good.
	fence = grant(token, owner, whole, flags)
	if fence then return report(token, '', command, channel, nil, token, owner, fence) end
	quit(token .. '#' .. owner)
	return report(token, '', command, channel, handOver(channel, {-1, token, round, '0'}))
end
if (not has or shared and isShared(flags)) and redis.call('EXISTS', queue) == 0 then
	fence = grant(token, owner, term, flags, '-')
	return report(token, '', command, channel, {fence and 1 or -1, token, round, fence or '0'})
end
-- Set the mark to + first, because the release of a hold with the mark - does not read the queue.
if mark == '-' then redis.call('SETRANGE', lock, 8, '+') end
local full = till == '0'
if full then
	kept = now() + window
	till = kept
end
till = timeout(till, command)
-- A token that has a place keeps it.
local new = redis.call('ZADD', timeouts, till, token) == 1
local ok, err = pcall(function()
	if new and redis.call('RPUSH', queue, entry) == 1 then
		-- The list is new. If an older list was lost, its places must go as well.
		redis.call('DEL', timeouts)
		redis.call('ZADD', timeouts, till, token)
		keepQueue()
	elseif full then
		keepQueue()
	end
end)
if not ok then
	-- A user without one of these rights must not leave a queue without an end.
	redis.pcall('LREM', queue, 0, entry)
	redis.call('ZREM', timeouts, token)
	return type(err) == 'table' and err or {err = tostring(err)}
end
if not has or shared then return report(token, '1', command, channel, handOver(channel)) end
-- If the term is below a third of the window, the hold may end before the client's next poll. The
-- client would miss the end, unless this report announces it.
local brief = not full and lasts and lasts * 3 >= window * 1
return report(token, '1', command, channel, nil, has, whose, fence, brief)
