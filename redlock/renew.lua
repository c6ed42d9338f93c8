-- Prolongs a hold on this node, and never shortens it. Raises the fence counter
-- to the hold's fence, even if the node does not have the hold: it may have lost
-- both.
-- KEYS: the lock, the node's mark, the fence counter
-- ARGV: how the record begins: the token and '#', or the token alone for the
-- record of any attempt with it; the term in ms; the hold's fence or '', the
-- counter's own term in ms
-- Returns {1, marked}, or {0, marked, the server's time in ms} if the token does
-- not hold the key. Marked is 1 if the node has a mark, and otherwise 0.
local marked = redis.call('EXISTS', KEYS[2])
if ARGV[3] ~= '' then
	local last = redis.pcall('GETRANGE', KEYS[3], 0, 16)
	if last == '' then last = '0' end
	-- Any other value is not ours. The next fenced acquire reports it.
	if type(last) == 'string' and string.match(last, '^%d+$') then
		if tonumber(last) < tonumber(ARGV[3]) then
			redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
		else
			redis.call('PEXPIRE', KEYS[3], ARGV[4])
		end
	end
end
local begins, record = ARGV[1], redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] + 15)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	record = ''
end
local rest = string.sub(record, #begins + 1)
if string.sub(record, 1, #begins) ~= begins
	or string.sub(begins, -1) ~= '#' and not string.find(rest, '^#') and not string.find(rest, '^~%d+#') then
	local now = redis.call('TIME')
	return {0, marked, string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))}
end
local left = redis.call('PTTL', KEYS[1])
-- Less than none is a key without an end, which stays one.
if left >= 0 and left < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {1, marked}
