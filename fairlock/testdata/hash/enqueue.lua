-- Queues a token, or grants it the key if that is free and has no queue.
-- KEYS: see record.lua
-- ARGV[2..]: token, owner, term of a hand-over in ms, whether fenced (0 or 1), PUBLISH, SPUBLISH or - for
-- the command that publishes to the client, channel, round, whole term in ms, window in ms
-- Returns what report returns.
local token, owner, term, fenced, command, channel, round, whole, window = unpack(ARGV, 2)
local has, whose, fence = holder()
if has == token then
	-- Replicas confirm only what was written. So PEXPIRE runs even if the term is longer already.
	local left = redis.call('PTTL', lock)
	if left >= 0 then redis.call('PEXPIRE', lock, math.max(left, whole)) end
	return report(token, '', command, channel, nil, has, whose, fence)
end
-- These raise WRONGTYPE before anything is written.
local length, till = redis.call('LLEN', queue), redis.call('ZSCORE', alive, channel)
if not has and length == 0 then
	fence = grant(token, owner, term, fenced)
	return report(token, '', command, channel, {fence and 1 or -1, token, round, fence or '0'})
end
-- A token that is in the queue keeps its place, and its entry is replaced.
local n = 0
if redis.call('HSET', entries, token, table.concat({command, channel, round, term, fenced, owner}, ' ')) == 1 then
	n = redis.call('RPUSH', queue, token)
end
if (n == 1 or not till or tonumber(till) - now() < window * 2 / 3) and not pcall(keepAlive, channel, window) then
	-- A user that may not PEXPIREAT must not leave a queue without an end.
	redis.call('LREM', queue, 1, token)
	redis.call('HDEL', entries, token)
	keepAlive(channel, window) -- raises the error
end
if has then return report(token, '1', command, channel, nil, has, whose, fence) end
return report(token, '1', command, channel, handOver(channel, 0, ''))
