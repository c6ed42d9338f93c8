-- The rest of acquire.lua, for a fenced claim.
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, mark} end
local fence, refused = propose(KEYS[2])
if not fence then return refused end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence, mark, redis.call('INFO', 'server')}
