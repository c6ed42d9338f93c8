-- Gives a token the key, if the key has no holder and no waiter. Otherwise it gives the token a place
-- in the queue, unless the token holds the key. A place that it already has is kept, and its entry is
-- rewritten with the present arguments. A free key is passed on.
-- ARGV[2..]: token, owner, term of a hand-over in ms, whether fenced (0 or 1), PUBLISH, SPUBLISH
-- or - for none, channel, round, the whole term in ms, the window in ms
-- Returns what state returns. A hold that the token has is raised to the whole term, and written in
-- any case, so that replicas can confirm it.
local token, owner, term, fenced, how, channel, round, whole, window = unpack(ARGV, 2)
local has, whose, fence = holder()
if has == token then
	local left = redis.call('PTTL', lock)
	if left >= 0 and left <= tonumber(whole) then redis.call('PEXPIRE', lock, whole) end
	return state(token, '', how, channel, nil, has, whose, fence)
end
-- What is of another type is found before anything is written.
local length, till = redis.call('LLEN', queue), redis.call('ZSCORE', alive, channel)
if not has and length == 0 then
	fence = take(token, owner, term, fenced)
	return state(token, '', how, channel, {fence and 1 or -1, token, round, fence or '0'})
end
local n = 0
if redis.call('HSET', entries, token, table.concat({how, channel, round, term, fenced, owner}, ' ')) == 1 then
	n = redis.call('RPUSH', queue, token)
end
if n == 1 or not till or tonumber(till) - now() < window * 2 / 3 then touch(channel, window) end
if has then return state(token, '1', how, channel, nil, has, whose, fence) end
return state(token, '1', how, channel, pass(channel, 0, ''))
