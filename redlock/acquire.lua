-- Proposes a fence for a free key. Then take.lua, which follows, takes the key. The text of
-- redisstore's fence.lua comes before this part.
-- KEYS: the lock, its fence counter, the node's mark
-- ARGV: the record, the term in ms
-- Returns {0, mark or ''} if the key is held, {-1} if the counter's value is not a
-- number that hasp wrote, or what take.lua returns.
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, redis.call('GET', KEYS[3]) or ''} end
local fence, refused = propose(KEYS[2])
if not fence then return refused end
