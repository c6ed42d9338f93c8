-- Takes the key if it is free. On the lead, queue.lua comes before.
-- KEYS: the lock, its fence counter, the node's mark
-- ARGV: the record, the term in ms, '' without a fence
-- Returns {0, mark or ''} if the key is held, {-1} if the counter's value is not a
-- number that hasp wrote, or {1, proposal of a fence or 0, mark or '', INFO server}.
-- Read the mark first: if GET fails, the script ends and the key stays free.
local mark = redis.call('GET', KEYS[3]) or ''
if ARGV[3] == '' then
	-- The reply is false if the key is held, and otherwise a table with ok or an error.
	local taken = redis.pcall('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'NX')
	if taken and taken.ok then return {1, '0', mark, redis.call('INFO', 'server')} end
	-- A server without memory refuses SET with an error, even if the key is held.
	if not taken or redis.call('EXISTS', KEYS[1]) == 1 then return {0, mark} end
	return taken
end
-- include fence
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, mark} end
local fence, refused = propose(KEYS[2])
if not fence then return refused end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, fence, mark, redis.call('INFO', 'server')}
