-- The usual case of release.lua, which has its keys and arguments: the first attempt of the token
-- has the key, frees it, and nobody is known to wait.
if not ARGV[5] and ARGV[4] == '' and redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1]) == ARGV[1] .. '#'
	and redis.call('EXISTS', KEYS[3]) == 0 then
	return redis.call('DEL', KEYS[1])
end
