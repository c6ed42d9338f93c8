-- Takes the key shared. share.lua comes before this part, and acquire.lua or queue.lua may.
-- KEYS: the lock, its fence counter, the node's mark
-- ARGV: the record, the term in ms
-- Returns {0, mark or ''} if the key is held, else what take.lua returns.
if held then return {0, redis.call('GET', KEYS[3]) or ''} end
-- Read the mark first: if GET fails, the script ends and takes nothing.
local mark = redis.call('GET', KEYS[3])
local refused = enter(KEYS[1], ARGV[1], tonumber(ARGV[2]), at)
if refused then return refused end
return {1, string.format('%.0f', fence), mark or '', redis.call('INFO', 'server')}
