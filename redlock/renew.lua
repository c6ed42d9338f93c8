-- Prolongs a hold on this node, and never shortens it; raises the fence counter
-- even if the hold is gone, because the node may have lost both. The texts of redisstore's
-- shared.lua and of own.lua come before this part.
-- KEYS: the lock, the node's mark, the fence counter
-- ARGV: the prefix of the attempt's record; the term in ms, or 0 to raise the counter only; the
-- hold's fence or ''; the counter's own term in ms; the owner if the hold is shared
-- Returns {1, run}, or {0, run, the server's time in ms} if the token does not hold the key.
-- Run is the one that the node's mark names, or '' if the node has no mark. If the term is 0, it
-- returns {-1} if the counter's value is not a number that hasp wrote.
local run = string.match(redis.call('GET', KEYS[2]) or '', '^%S*')
if ARGV[3] ~= '' then
	local last = redis.pcall('GETRANGE', KEYS[3], 0, 16)
	if last == '' then last = '0' end
	if type(last) == 'string' and string.match(last, '^%d+$') then
		if tonumber(last) < tonumber(ARGV[3]) then
			redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
		else
			redis.call('PEXPIRE', KEYS[3], ARGV[4])
		end
	elseif ARGV[2] == '0' then
		local denied = type(last) == 'table' and not string.find(last.err, 'WRONGTYPE', 1, true)
		return denied and last or {-1}
	end
	-- A renewal leaves any other value alone. The next fenced acquire reports it.
end

local holds, refused
if ARGV[5] then
	-- A shared hold: the member gets the new term, and never a shorter one.
	local now = clock()
	holds = readers(KEYS[1], now) and find(KEYS[1], ARGV[1], ARGV[5], now)
	refused = holds and enter(KEYS[1], holds, tonumber(ARGV[2]), now)
	if refused then return refused end
else
	holds, refused = owns(KEYS[1], ARGV[1])
	if refused then return refused end
	-- A PTTL of -1 means that the key has no end. Leave it so.
	local left = holds and redis.call('PTTL', KEYS[1]) or -1
	if left ~= -1 and left < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
end
return holds and {1, run} or {0, run, string.format('%.0f', clock())}
