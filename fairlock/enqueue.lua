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
	-- The token has the key: the key was handed over, or a reply was lost.
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
-- If the key is free for the claim and nobody waits, grant it at once, for the term of a hand-over.
if (not has or shared and isShared(flags)) and redis.call('EXISTS', queue) == 0 then
	fence = grant(token, owner, term, flags, '-')
	return report(token, '', command, channel, {fence and 1 or -1, token, round, fence or '0'})
end
-- Set the mark to + first, because the release of a hold with the mark - does not read the queue.
if mark == '-' then redis.call('SETRANGE', lock, 8, '+') end
-- With a full report, this call keeps a place for the whole window. Otherwise the place ends with
-- the client's other places.
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
	-- This user may lack the right to one of these commands. Then it must not leave a place, or a
	-- queue that does not expire.
	redis.pcall('LREM', queue, 0, entry)
	redis.call('ZREM', timeouts, token)
	return type(err) == 'table' and err or {err = tostring(err)}
end
-- A free or a shared key may be handed to the first waiters, among which this one may be.
if not has or shared then return report(token, '1', command, channel, handOver(channel)) end
-- A brief report leaves out the end of the holder's term. If the term is below a third of the
-- window, it may end before the client's next poll, so the client must learn of it by a full
-- report.
local brief = not full and lasts and lasts * 3 >= window * 1
return report(token, '1', command, channel, nil, has, whose, fence, brief)
