-- Begins a renewal: raises the fence counter even if the hold is gone, because the node may
-- have lost both. KEYS and ARGV are those of renew.lua.
local marked = redis.call('EXISTS', KEYS[2])
if ARGV[3] ~= '' then
	local last = redis.pcall('GETRANGE', KEYS[3], 0, 16)
	if last == '' then last = '0' end
	-- Leave any other value alone. The next fenced acquire reports it.
	if type(last) == 'string' and string.match(last, '^%d+$') then
		if tonumber(last) < tonumber(ARGV[3]) then
			redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
		else
			redis.call('PEXPIRE', KEYS[3], ARGV[4])
		end
	end
end
