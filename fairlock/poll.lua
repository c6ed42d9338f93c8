-- Keeps places of a client alive, reports them, and hands over a key that is free or has a shared
-- record.
-- KEYS: see record.lua
-- ARGV[2..]: the command in the client's entries (- if the client has no subscription), channel,
-- window in ms, the client's tokens
-- Returns what report returns.
-- include fence shared record queue grant offer handover report
local command, channel, window = unpack(ARGV, 2, 4)
local tokens, scores, found = {unpack(ARGV, 5)}, {}, ''
kept = now() + window
for i, token in ipairs(tokens) do scores[2 * i - 1], scores[2 * i] = timeout(kept, command), token end
-- If the list of the entries was lost, its places must go as well. Then the clients queue again.
if redis.call('EXISTS', queue) == 0 then redis.call('DEL', timeouts) end
redis.call('ZADD', timeouts, 'XX', unpack(scores))
for _, score in ipairs(redis.call('ZMSCORE', timeouts, unpack(tokens))) do found = found .. (score and 1 or 0) end
sweep()
keepQueue()
local has, whose, fence = holder()
if has and not shared then return report(nil, found, command, channel, nil, has, whose, fence) end
-- A waiter that has joined a shared record, and whose message was lost, has no place any more. So
-- its client queues again, and enqueue.lua finds its hold.
return report(nil, found, command, channel, handOver(channel))
