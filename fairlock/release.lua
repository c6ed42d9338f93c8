-- Gives a key back, if the token holds it, and hands it to the next waiter. Else the token loses
-- its place in the queue, if it has one.
-- ARGV[2]: the token
-- Returns {1} and what pass says, or {0} if the token does not hold the key.
if holder() ~= ARGV[2] then
	if redis.call('HEXISTS', entries, ARGV[2]) == 1 then forget(ARGV[2]) end
	return {0}
end
redis.call('DEL', lock)
-- The key is given back, whatever becomes of it: without memory to write in, nobody is handed it.
local ok, told = pcall(pass, '', 0, '')
return {1, unpack(ok and told or {})}
