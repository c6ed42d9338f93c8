-- Queues a token, or grants it the key if that has no queue and is free. A shared hold may join a shared
-- record.
-- KEYS: see record.lua
-- ARGV[2..]: the entry, whole term in ms, window in ms, whether the client needs a full report and to
-- be kept alive (0 or 1), and other entries of the token that earlier calls may have queued
-- Returns what report returns.
local entry, whole, window, full = unpack(ARGV, 2, 5)
local token, command, channel, round, term, flags, owner = parse(entry)
local has, whose, fence, mark, since, lasts = holder()
if has == token then
	prolong(whole, since, lasts)
	return report(token, '', command, channel, nil, has, whose, fence)
end
if shared and redis.call('ZSCORE', lock, token .. '#' .. owner) then
	-- The reply or the message about the grant was lost, and its fence with it. A new one is as good.
	fence = grant(token, owner, whole, flags)
	if fence then return report(token, '', command, channel, nil, token, owner, fence) end
	quit(token .. '#' .. owner)
	return report(token, '', command, channel, handOver(channel, 0, '', {-1, token, round, '0'}))
end
-- These raise WRONGTYPE before anything is written.
local last = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')
local till = full == '1' and redis.call('ZSCORE', clients, channel)
if (not has or shared and isShared(flags)) and not last[1] then
	fence = grant(token, owner, term, flags, '-')
	return report(token, '', command, channel, {fence and 1 or -1, token, round, fence or '0'})
end
-- The mark comes first. The release of a hold without a mark would not read the queue.
if mark == '-' then redis.call('SETRANGE', lock, 8, '+') end
-- A token that is in the queue keeps its place, and its entry is replaced. The new entry comes
-- first, because Redis deletes an empty set together with its time to live.
local place = (last[2] or 0) + 1
for i = 6, #ARGV do place = math.min(place, redis.call('ZSCORE', queue, ARGV[i]) or place) end
redis.call('ZADD', queue, 'NX', string.format('%.0f', place), entry)
if (not last[1] or full == '1' and (not till or tonumber(till) - now() < window * 2 / 3)) and not pcall(keepAlive, channel, window) then
	-- A user that may not PEXPIREAT must not leave a queue without an end.
	redis.call('ZREM', queue, entry)
	keepAlive(channel, window) -- raises the error
end
-- The user may not have this right, so the queue has its end already.
if ARGV[6] then redis.call('ZREM', queue, unpack(ARGV, 6)) end
if not has or shared then return report(token, '1', command, channel, handOver(channel, 0, '')) end
-- If the term is below a third of the window, the hold may end before the client's next poll. The
-- client would miss the end, unless this report announces it.
local brief = full == '0' and lasts and lasts * 3 >= window * 1
return report(token, '1', command, channel, nil, has, whose, fence, brief)
