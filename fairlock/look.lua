-- Records that a client is alive, reports the state of its tokens, and passes a free key on.
-- ARGV[2..]: PUBLISH, SPUBLISH or - for none, channel, window in ms, the position in the queue to
-- begin at and the token before it, and the tokens; without tokens it only passes the key on
-- Returns what state returns.
if redis.call('LLEN', queue) ~= redis.call('HLEN', entries) then
	redis.call('DEL', queue, entries, alive) -- part of it was evicted: all come again
end
local found = ''
for i = 7, #ARGV do found = found .. redis.call('HEXISTS', entries, ARGV[i]) end
if string.find(found, '1', 1, true) then touch(ARGV[3], ARGV[4]) end
local has, whose, fence = holder()
if has then return state(nil, found, ARGV[2], ARGV[3], nil, has, whose, fence) end
return state(nil, found, ARGV[2], ARGV[3], pass(ARGV[3], ARGV[5], ARGV[6]))
