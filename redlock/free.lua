-- The usual case of release.lua, which has its keys and arguments: the first attempt of the token
-- has the key, frees it, and nobody is known to wait. MGET replies nil for a set, and it may need a
-- right that this user lacks.
if not ARGV[5] and ARGV[4] == '' then
	local at, prefix = redis.pcall('MGET', KEYS[1], KEYS[4]), ARGV[1] .. '#'
	if at[1] and not at[2] and string.sub(at[1], 1, #prefix) == prefix then return redis.call('DEL', KEYS[1]) end
end
