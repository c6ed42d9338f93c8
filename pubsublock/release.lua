-- Releases a key, if the token holds it, and wakes the waiters. If a rest of the term is given, the
-- key stays taken, and the waiters learn the new end of the term.
-- KEYS: the lock, and the intent if the token may have left one
-- ARGV: the token and '#', the owner, the rest of the term in ms or '', the channel, the
-- command that publishes
-- Returns 0 if the token does not hold the key, even if the script removed the token's intent.
-- Otherwise it returns 1 if the server has refused to publish, or else two more than the number of
-- connections that the message has reached.
local keep = ARGV[3] ~= ''
local gone = keep and 0 or redis.pcall('HDEL', KEYS[1], ARGV[1] .. ARGV[2])
local held = gone == 1
if not held then
	-- The token alone decides. The record may name another owner.
	if gone == 0 then gone = redis.pcall('HLEN', KEYS[1]) end
	local field = gone == 1 and redis.call('HKEYS', KEYS[1])[1]
	held = field and string.sub(field, 1, #ARGV[1]) == ARGV[1]
	local intent = not held and KEYS[2] and redis.pcall('GETRANGE', KEYS[2], 0, -1)
	if type(gone) ~= 'number' and not string.find(gone.err, 'WRONGTYPE', 1, true) then
		return gone
	elseif held and keep then
		-- No claim has the new token, so no late command changes this record. PEXPIRE comes first,
		-- because a Redis that is out of memory refuses HSET unless the script has written before.
		redis.call('PEXPIRE', KEYS[1], ARGV[3])
		redis.call('HSET', KEYS[1], 'kept-' .. field, 1)
		redis.call('HDEL', KEYS[1], field)
	elseif held then
		redis.call('DEL', KEYS[1])
	elseif type(intent) == 'string' and intent .. '#' == ARGV[1] then
		-- The caller does not wait any more, so readers need not wait for it.
		redis.call('UNLINK', KEYS[2])
	else
		return 0
	end
end
-- The key is free even if this user may not publish. Waiters that get no message retry within a
-- second.
local reached = redis.pcall(ARGV[5], ARGV[4], '0')
return held and (type(reached) == 'number' and 2 + reached or 1) or 0
