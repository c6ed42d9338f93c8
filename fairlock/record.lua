-- Shared by all scripts that may give the key to somebody.
-- KEYS: the lock, its fence counter, the queue, its entries, alive-until
-- ARGV: the counter's own term in ms, and what the script itself says
local lock, counter, queue, entries, alive = unpack(KEYS)
local time
local function now() -- by the server's clock, in ms
	time = time or redis.call('TIME')
	return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function wrongtype(reply) return string.find(reply.err, 'WRONGTYPE', 1, true) end
-- Token, owner and fence of the hold; true if it is a stranger's; nil if there is none.
local function holder()
	local r = redis.pcall('HMGET', lock, 'token', 'owner', 'fence')
	if r.err and not wrongtype(r) then redis.call('HMGET', lock, 'token') end -- raises it
	if r[1] then return r[1], r[2], r[3] end
	if r.err or redis.call('EXISTS', lock) == 1 then return true end
end
-- Puts the fence up, or returns nil if the counter holds what is no fence.
local function raise()
	local last = redis.pcall('GETRANGE', counter, 0, 16)
	if type(last) ~= 'string' then return not wrongtype(last) and redis.call('GETRANGE', counter, 0, 16) or nil end
	local fence = now() and time[1] * 1000000 + time[2]
	if last ~= '' then
		-- Beyond 2^53 a number of Lua no longer has a successor.
		if not string.match(last, '^%d+$') or tonumber(last) > 9007199254740990 then return nil end
		fence = math.max(fence, tonumber(last) + 1)
	end
	fence = string.format('%.0f', fence)
	redis.call('SET', counter, fence, 'PX', ARGV[1])
	return fence
end
-- Writes the record of a free key and returns its fence, or nil if none is to be had.
local function take(token, owner, term, fenced)
	local fence = fenced == '0' and '0' or raise()
	if not fence then return end
	redis.call('HSET', lock, 'token', token, 'owner', owner, 'since', now(), 'fence', fence)
	if redis.pcall('PEXPIRE', lock, term) ~= 1 then redis.call('DEL', lock) redis.call('PEXPIRE', lock, term) end
	return fence
end
