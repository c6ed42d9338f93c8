-- Prolongs a hold on this node, and never shortens it; raises the fence counter
-- even if the hold is gone, because the node may have lost both. The texts of redisstore's
-- shared.lua and of own.lua come before this part.
-- KEYS: the lock, the node's mark, the fence counter
-- ARGV: the record's prefix: token# or token~n# for one attempt, the token alone
-- for any; the term in ms; the hold's fence or ''; the counter's own term in ms; the owner
-- if the hold is shared
-- Returns {1, run}, or {0, run, the server's time in ms} if the token does not hold the key.
-- Run is the one that the node's mark names, or '' if the node has no mark.
local run = string.match(redis.call('GET', KEYS[2]) or '', '^%S*')
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

-- A shared hold: each member of this caller gets the new term, and never a shorter one.
if ARGV[5] then
	local now = clock()
	local members = (readers(KEYS[1], now) or 0) > 0 and own(KEYS[1], ARGV[1], ARGV[5]) or {}
	for _, member in ipairs(members) do
		local refused = enter(KEYS[1], member, tonumber(ARGV[2]), now)
		if refused then return refused end
	end
	return members[1] and {1, run} or {0, run, string.format('%.0f', now)}
end

local prefix, record = ARGV[1], redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] + 15)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	record = ''
end
-- After a token alone comes #owner or ~n#owner. Anything else is a longer token.
local rest = string.sub(record, #prefix + 1)
if string.sub(record, 1, #prefix) ~= prefix
	or string.sub(prefix, -1) ~= '#' and not string.find(rest, '^#') and not string.find(rest, '^~%d+#') then
	local now = redis.call('TIME')
	return {0, run, string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))}
end

local left = redis.call('PTTL', KEYS[1])
-- A PTTL of -1 means that the key has no end. Leave it so.
if left ~= -1 and left < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {1, run}
