-- Releases a key on this node, if the token holds it, and publishes the release. With a
-- rest of the term, the key stays taken, by no token that any client knows.
-- KEYS: the lock, the queue's turns and looks
-- ARGV: the record's prefix: token# or token~n# for one attempt, the token alone
-- for any; the channel, or ''; the message; the rest of the term in ms, if the key stays
-- taken
-- Returns 0 if the token does not hold the key, 1 if nobody is known to wait for it,
-- else a larger number.
local prefix, record = ARGV[1], redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] + 15)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0
end
-- After a token alone comes #owner or ~n#owner. Anything else is a longer token.
local rest = string.sub(record, #prefix + 1)
if string.sub(record, 1, #prefix) ~= prefix
	or string.sub(prefix, -1) ~= '#' and not string.find(rest, '^#') and not string.find(rest, '^~%d+#') then
	return 0
end

if ARGV[4] then
	-- Without memory, Redis refuses SET before a script has written anything, so PEXPIRE
	-- comes first.
	record = redis.call('GETRANGE', KEYS[1], 0, -1)
	redis.call('PEXPIRE', KEYS[1], ARGV[4])
	redis.call('SET', KEYS[1], 'kept-' .. record, 'PX', ARGV[4])
else
	redis.call('DEL', KEYS[1])
end
if ARGV[2] == '' then return 1 end
return 1 + wake(KEYS[2], KEYS[3], ARGV[2], ARGV[3])
