-- Takes the key, which acquire.lua or queue.lua has found free. fence is theirs.
-- KEYS: the lock, its fence counter, the node's mark
-- ARGV: the record, the term in ms
-- Returns {1, fence that acquire.lua proposes or 0, mark or '', INFO server}.
-- Read the mark first: if GET fails, the script ends and the key stays free.
local mark = redis.call('GET', KEYS[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence, mark or '', redis.call('INFO', 'server')}
