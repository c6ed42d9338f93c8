-- Prolongs a hold on this node, and never shortens it.
-- KEYS: the lock
-- ARGV: how the record begins: the token and '#', or the token alone for the
-- record of any attempt with it; the term in ms
-- Returns {1}, or {0, the server's time in ms} if the token does not hold the
-- key.
local begins, record = ARGV[1], redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] + 15)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	record = ''
end
local rest = string.sub(record, #begins + 1)
if string.sub(record, 1, #begins) ~= begins
	or string.sub(begins, -1) ~= '#' and not string.find(rest, '^#') and not string.find(rest, '^~%d+#') then
	local now = redis.call('TIME')
	return {0, string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))}
end
local left = redis.call('PTTL', KEYS[1])
-- Less than none is a key without an end, which stays one.
if left >= 0 and left < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {1}
