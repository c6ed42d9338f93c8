-- Raises a fence counter on this node, and never lowers it.
-- KEYS: the fence counter, the lock
-- ARGV: the prefix of the attempt's record, the fence, the counter's own term in ms; the
-- record if the hold is shared
-- Returns 1 if this node has the attempt's record, 0 if it does not, or -1 if the
-- counter's value is not a number that hasp wrote.
local last = redis.pcall('GETRANGE', KEYS[1], 0, 16)
if type(last) ~= 'string' then
	if not string.find(last.err, 'WRONGTYPE', 1, true) then return last end
	return -1
end
if last ~= '' and not string.match(last, '^%d+$') then return -1 end
if last == '' or tonumber(last) < tonumber(ARGV[2]) then
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
else
	redis.call('PEXPIRE', KEYS[1], ARGV[3])
end

if ARGV[4] then return type(redis.pcall('ZSCORE', KEYS[2], ARGV[4])) == 'string' and 1 or 0 end
-- Another type of value is another holder's.
if redis.pcall('GETRANGE', KEYS[2], 0, #ARGV[1] - 1) == ARGV[1] then return 1 end
return 0
