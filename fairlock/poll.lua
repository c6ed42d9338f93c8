-- Keeps a client's places in the queue alive, reports them, and hands over a key that is free or has a
-- shared record.
-- KEYS: see record.lua
-- ARGV[2..]: PUBLISH, SPUBLISH or - for the command that publishes to the client, channel, window in ms,
-- the position in the queue to begin at and the entry before it, and the client's entries, if any
-- Returns what report returns.
local found = ''
for i = 7, #ARGV do found = found .. (redis.call('ZSCORE', queue, ARGV[i]) and 1 or 0) end
if string.find(found, '1', 1, true) then keepAlive(ARGV[3], ARGV[4]) end
local has, whose, fence = holder()
if has and not shared then return report(nil, found, ARGV[2], ARGV[3], nil, has, whose, fence) end
-- If a message to a reader was lost, its place is not found. So it queues again, and enqueue finds its hold.
return report(nil, found, ARGV[2], ARGV[3], handOver(ARGV[3], ARGV[5], ARGV[6]))
