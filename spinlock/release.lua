-- Releases a key, if the token holds it. If a rest of the term is given, the key stays taken.
-- KEYS: the lock
-- ARGV: the token with '~' after it, a channel if Spring's registry listens there or '',
-- and the rest of the term in ms if the key stays taken or ''
-- Returns 1, or 0 if the token does not hold the key.
local record = redis.pcall('GETRANGE', KEYS[1], '0', '1023')
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0 -- the value is no string, so the token does not hold the key
end
if string.sub(record, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
if ARGV[3] ~= '' then
	-- Change the token to one that no claim has, so that no late command changes this record.
	-- PEXPIRE comes first, because a Redis that is out of memory refuses SET unless the script has
	-- written before.
	record = redis.call('GETRANGE', KEYS[1], '0', '-1')
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
	redis.call('SET', KEYS[1], 'kept-' .. record, 'PX', ARGV[3])
	return 1
end
-- The record is small, so UNLINK would save nothing.
redis.call('DEL', KEYS[1])
-- The key is free even if this user may not publish.
if ARGV[2] ~= '' then redis.pcall('PUBLISH', ARGV[2], KEYS[1]) end
return 1
