-- Says that a client is alive and what has become of its tokens, and passes a free key on.
-- ARGV[2..]: channel, window in ms, where in the queue to begin and the token before that,
-- and the tokens; without tokens it only passes the key on
-- Returns what state says.
if redis.call('LLEN', queue) ~= redis.call('HLEN', entries) then
	redis.call('DEL', queue, entries, alive) -- part of it was evicted: all come again
end
local found = ''
for i = 6, #ARGV do found = found .. redis.call('HEXISTS', entries, ARGV[i]) end
if string.find(found, '1', 1, true) then touch(ARGV[2], ARGV[3]) end
local has, whose, fence = holder()
if has then return state(nil, found, nil, has, whose, fence) end
return state(nil, found, pass(ARGV[2], ARGV[4], ARGV[5]))
