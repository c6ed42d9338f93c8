-- Prolongs a hold on this node, and never shortens it; raises the fence counter
-- even if the hold is gone, because the node may have lost both. The texts of clock.lua and
-- own.lua come before this part.
-- KEYS: the lock, the node's mark, the fence counter
-- ARGV: the prefix of the attempt's record; the term in ms, or '' if the hold keeps its term; the
-- hold's fence or ''; the counter's own term in ms
-- Returns {1 or 0, mark or '', the server's time in ms}, with 0 if the token does not hold the key.
-- If no term is given, it returns {-1} if the counter's value is not a number that hasp wrote.
local mark = redis.call('GET', KEYS[2]) or ''
if ARGV[3] ~= '' then
	local last = redis.pcall('GETRANGE', KEYS[3], 0, 16)
	if last == '' then last = '0' end
	if type(last) == 'string' and string.match(last, '^%d+$') then
		if tonumber(last) < tonumber(ARGV[3]) then
			redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
		else
			redis.call('PEXPIRE', KEYS[3], ARGV[4])
		end
	elseif ARGV[2] == '' then
		-- A call without a term may confirm a new hold (see holds.confirm), which must not be
		-- granted if its fence cannot be stored.
		local denied = type(last) == 'table' and not string.find(last.err, 'WRONGTYPE', 1, true)
		return denied and last or {-1}
	end
	-- A renewal ignores a counter with any other value. The next fenced acquire reports it.
end

local holds, refused = owns(KEYS[1], ARGV[1])
if refused then return refused end
if holds and ARGV[2] ~= '' then
	-- A PTTL of -1 means that the key has no end. Leave it so.
	local left = redis.call('PTTL', KEYS[1])
	if left ~= -1 and left < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
end
return {holds and 1 or 0, mark, string.format('%.0f', clock())}
