-- Releases a hold on this node, if the token has it, and publishes that the key is free. If a rest
-- of the term is given, the key stays taken, by a token that no client knows.
-- KEYS: the lock, the queue's turns and looks, the sign that callers wait
-- ARGV: the record's prefix, as in own.lua; the channel, or ''; the message; the rest of the term
-- in ms if the key stays taken, or ''
-- Returns 0 if the token does not hold the key, 1 if no caller is known to wait, and otherwise 2.
if ARGV[4] == '' then
	-- Usually the first attempt of the token has the key, and no caller is known to wait. Then only
	-- DEL is needed. Otherwise go on below, also if MGET replies nil for a value that is no string,
	-- or an error because this user lacks a right.
	local at, prefix = redis.pcall('MGET', KEYS[1], KEYS[4]), ARGV[1] .. '#'
	if at[1] and not at[2] and string.sub(at[1], 1, #prefix) == prefix then return redis.call('DEL', KEYS[1]) end
end
-- include own clock turns
local holds, err = owns(KEYS[1], ARGV[1])
if not holds then return err or 0 end
if ARGV[4] ~= '' then
	-- A Redis without memory refuses SET if it is the first write of a script. So PEXPIRE comes
	-- first.
	local record = redis.call('GETRANGE', KEYS[1], 0, -1)
	redis.call('PEXPIRE', KEYS[1], ARGV[4])
	redis.call('SET', KEYS[1], 'kept-' .. record, 'PX', ARGV[4])
else
	redis.call('DEL', KEYS[1])
end
return ARGV[2] ~= '' and wake(KEYS[2], KEYS[3], ARGV[2], ARGV[3]) and 2 or 1
