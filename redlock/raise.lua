-- Raises a fence counter, and never lowers it.
-- KEYS: the fence counter
-- ARGV: the fence, the counter's own term in ms
-- Returns 1, or -1 if the counter holds what no version of this script wrote.
local last = redis.pcall('GETRANGE', KEYS[1], 0, 16)
if type(last) ~= 'string' then
	if not string.find(last.err, 'WRONGTYPE', 1, true) then return last end
	return -1
end
if last ~= '' and not string.match(last, '^%d+$') then return -1 end
if last == '' or tonumber(last) < tonumber(ARGV[1]) then
	redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
else
	redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
