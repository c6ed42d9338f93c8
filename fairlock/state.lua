-- Puts off the end of a client's places in the queue, and of the queue.
local function touch(channel, window)
	redis.call('ZADD', alive, now() + window, channel)
	redis.call('ZREMRANGEBYSCORE', alive, '-inf', now())
	local last = redis.call('ZREVRANGE', alive, 0, 0, 'WITHSCORES')[2]
	for i = 3, 5 do redis.call('PEXPIREAT', KEYS[i], string.format('%.0f', tonumber(last))) end
end
-- What enqueue and look return: {1 if the calling token holds the key and otherwise 0, PTTL, 1 if a
-- stranger holds it, 1 if the channel of the calling client has no subscriber, token, fence and owner
-- of the hold, for each token asked for 1 if it is in the queue and otherwise 0}, followed by what
-- pass returns if the key was free.
local function state(asks, found, how, channel, told, token, owner, fence)
	if told then token, owner, fence = holder() end
	local stranger = token == true and 1 or 0
	if stranger == 1 or not token then token = '' end
	local mine = token == asks and 1 or 0
	local lost = deaf(how, channel) and 1 or 0
	return {mine, redis.call('PTTL', lock), stranger, lost, token, fence or '0', owner or '', found, unpack(told or {})}
end
