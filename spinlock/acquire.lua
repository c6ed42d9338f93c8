-- Takes a free key, with a fence if that is wanted.
-- KEYS: the lock, its fence counter if a fence is wanted, the intent if the caller waits
-- ARGV: the record, the term in ms, the counter's own term in ms or ''; and if the caller
-- waits, the token and the term of the intent in ms
-- Returns what redisstore.Store.Granted decodes.
local intent = ARGV[4] and KEYS[#KEYS]
local left = redis.call('PTTL', KEYS[1])
if left ~= -2 then -- the key is held
	local record = redis.pcall('GETRANGE', KEYS[1], '0', '1023')
	if type(record) == 'string' then return {0, left, record} end
	-- The value is no string, so it may be a shared record.
	-- include look
	local member = look(KEYS[1], 1)[1]
	-- If SET fails, the caller is refused all the same, but readers may come before it.
	if member and intent then redis.pcall('SET', intent, ARGV[4], 'PX', ARGV[5]) end
	return {0, left, '', member}
end
local fence, refused
if ARGV[3] ~= '' then
	-- include fence
	-- Write the counter first, so that the key is not taken if Redis refuses one of the writes.
	fence, refused = nextFence(KEYS[2], ARGV[3])
	if not fence then return refused end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
-- The caller holds the key, so it does not wait for readers any more. The intent goes last,
-- because a Redis without memory refuses a SET only before the script has written. If this user
-- may not remove the intent, it expires.
if intent then redis.pcall('UNLINK', intent) end
return fence or 1
