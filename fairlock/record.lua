-- Reads the record of a lock. Every script that may grant the key begins with this part.
-- KEYS: the lock, its fence counter, the queue, its entries, alive-until
-- ARGV: the counter's own term in ms, and then the script's own arguments
local lock, counter, queue, entries, alive = unpack(KEYS)
local time

-- Returns the server's clock in ms.
local function now()
	time = time or redis.call('TIME')
	return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function wrongtype(reply) return string.find(reply.err, 'WRONGTYPE', 1, true) end

-- Returns token, owner and fence of the hold; true if the record is not of this strategy; or nil if
-- the key is free.
local function holder()
	local r = redis.pcall('HMGET', lock, 'token', 'owner', 'fence')
	if r.err and not wrongtype(r) then redis.call('HMGET', lock, 'token') end -- raises the error
	if r[1] then return r[1], r[2], r[3] end
	if r.err or redis.call('EXISTS', lock) == 1 then return true end
end
