-- Releases a key, if the token holds it, and wakes the waiters. If a rest of the term is given, the
-- key stays taken, and the waiters learn the new end of the term.
-- KEYS: the lock, and the intent if the token may have left one
-- ARGV: the token and '#', the owner, the rest of the term in ms or '', the channel, the
-- command that publishes
-- Returns 0 if the token does not hold the key, even if the script removed the token's intent.
-- Otherwise it returns 1 if the server has refused to publish, or else two more than the number of
-- connections that the message has reached.
local keep = ARGV[3] ~= ''
-- Usually the field is the token and this owner. Redis removes a hash without fields.
local count = keep and 0 or redis.pcall('HDEL', KEYS[1], ARGV[1] .. ARGV[2])
local held = count == 1 -- whether the token held the key
if not held then
	-- The token alone decides. The record may name another owner. From here, count is the number of
	-- fields, or the error of HDEL or HLEN.
	if count == 0 then count = redis.pcall('HLEN', KEYS[1]) end
	local field = count == 1 and redis.call('HKEYS', KEYS[1])[1]
	held = field and string.sub(field, 1, #ARGV[1]) == ARGV[1]
	local intent = not held and KEYS[2] and redis.pcall('GETRANGE', KEYS[2], 0, -1)
	if type(count) ~= 'number' and not string.find(count.err, 'WRONGTYPE', 1, true) then
		return count
	elseif held and keep then
		-- Change the token to one that no claim has, so that no late command changes this record.
		-- PEXPIRE comes first, because a Redis that is out of memory refuses HSET unless the script
		-- has written before.
		redis.call('PEXPIRE', KEYS[1], ARGV[3])
		redis.call('HSET', KEYS[1], 'kept-' .. field, 1)
		redis.call('HDEL', KEYS[1], field)
	elseif held then
		redis.call('DEL', KEYS[1])
	elseif type(intent) == 'string' and intent .. '#' == ARGV[1] then
		-- The intent is the caller's, who does not wait any more. The message below lets the
		-- readers try at once.
		redis.call('UNLINK', KEYS[2])
	else
		return 0
	end
end
-- The key is free even if this user may not publish. Waiters that get no message retry within a
-- second.
local reached = redis.pcall(ARGV[5], ARGV[4], '0')
return held and (type(reached) == 'number' and 2 + reached or 1) or 0
