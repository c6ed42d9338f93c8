-- Takes a free key, with a fence if that is wanted. If readers refused the driver before, the
-- script also stores or removes the intent.
-- KEYS: the lock, its fence counter if a fence is wanted, the intent if readers refused
-- ARGV: the field of the record, the term in ms, the counter's own term in ms or ''; and if
-- readers refused, the token and the term of the intent in ms (0 if the caller does not wait)
-- Returns what redisstore.Store.Granted decodes.
local intent = ARGV[4] and KEYS[#KEYS]
local left = redis.call('PTTL', KEYS[1])
if left ~= -2 then -- the key is held
	local fields = redis.pcall('HLEN', KEYS[1])
	if type(fields) == 'number' then
		local field = fields == 1 and redis.call('HKEYS', KEYS[1])[1] or ''
		return {0, left, string.sub(field, 1, 1024)}
	end
	-- The value is no hash, so it may be a shared record.
	-- include look
	local member = look(KEYS[1], 1)[1]
	-- If SET fails, the caller is refused all the same, but readers may come before it.
	if member and intent and ARGV[5] ~= '0' then
		redis.pcall('SET', intent, ARGV[4], 'PX', ARGV[5])
	end
	return {0, left, '', member}
end
local fence, refused
if ARGV[3] ~= '' then
	-- include fence
	-- Write the counter first, so that the key is not taken if Redis refuses one of the writes.
	fence, refused = nextFence(KEYS[2], ARGV[3])
	if not fence then return refused end
end
redis.call('HSET', KEYS[1], ARGV[1], '1')
local set = redis.pcall('PEXPIRE', KEYS[1], ARGV[2])
if set ~= 1 then
	-- A user that may not PEXPIRE must not leave a lock without an end.
	redis.call('DEL', KEYS[1])
	return set
end
-- The caller holds the key, so it does not wait for readers any more. The intent goes last,
-- because a Redis without memory refuses an HSET only before the script has written. If this
-- user may not remove the intent, it expires.
if intent then redis.pcall('UNLINK', intent) end
return fence or 1
