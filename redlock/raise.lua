-- Raises a fence counter on this node, and never lowers it.
-- KEYS: the fence counter, the lock, the node's mark
-- ARGV: the prefix of the attempt's record, the fence, the counter's own term in ms; the
-- record if the hold is shared
-- Returns {1 if this node has the attempt's record, else 0, the run that the mark names or ''},
-- or {-1} if the counter's value is not a number that hasp wrote.
local run = string.match(redis.call('GET', KEYS[3]) or '', '^%S*')
local last = redis.pcall('GETRANGE', KEYS[1], 0, 16)
if type(last) ~= 'string' then
	if not string.find(last.err, 'WRONGTYPE', 1, true) then return last end
	return {-1}
end
if last ~= '' and not string.match(last, '^%d+$') then return {-1} end
if last == '' or tonumber(last) < tonumber(ARGV[2]) then
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
else
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
end

local there
if ARGV[4] then
	there = type(redis.pcall('ZSCORE', KEYS[2], ARGV[4])) == 'string'
else
	-- Another type of value is another holder's.
	there = redis.pcall('GETRANGE', KEYS[2], 0, #ARGV[1] - 1) == ARGV[1]
end
return {there and 1 or 0, run}
