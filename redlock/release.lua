-- Gives a key back on this node, if the token holds it, and tells those who
-- wait for it.
-- KEYS: the lock
-- ARGV: how the record begins: the token and '#', or the token alone for the
-- record of any attempt with it; the channel, the message, which is followed
-- by how many hear it
-- Returns 0 if the token does not hold the key, and else one more than how many
-- hear the message.
local begins, record = ARGV[1], redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] + 15)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0
end
local rest = string.sub(record, #begins + 1)
if string.sub(record, 1, #begins) ~= begins
	or string.sub(begins, -1) ~= '#' and not string.find(rest, '^#') and not string.find(rest, '^~%d+#') then
	return 0
end
redis.call('DEL', KEYS[1])
-- The key is free whether or not this user may publish; those who are not
-- told look for themselves.
if ARGV[2] == '' then return 1 end
local crowd = redis.pcall('PUBSUB', 'NUMSUB', ARGV[2])[2] or 1
redis.pcall('PUBLISH', ARGV[2], ARGV[3] .. ' ' .. tostring(crowd))
return 1 + tonumber(crowd)
