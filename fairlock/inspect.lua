-- Reports the holder of a key and its waiters.
-- KEYS: the lock, its fence counter, the queue, its entries, alive-until
-- Returns {PTTL, owner, since in ms, fence, owners of the waiters in order}, with '' for
-- what does not exist. A PTTL of -2 means that the key is free, and -1 that it has no end.
local fence = redis.pcall('GETRANGE', KEYS[2], 0, 16)
local hold = redis.pcall('HMGET', KEYS[1], 'owner', 'since', 'token')
if hold.err or not hold[3] then hold = {} end
local reply = {redis.call('PTTL', KEYS[1]), hold[1] or '', hold[2] or '', type(fence) == 'string' and fence or ''}
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
-- A value of another type is no queue.
local queue = redis.pcall('LRANGE', KEYS[3], 0, -1)
if queue.err and not string.find(queue.err, 'WRONGTYPE', 1, true) then return queue end
for _, token in ipairs(queue) do
	local entry = redis.pcall('HGET', KEYS[4], token)
	local channel, owner = string.match(type(entry) == 'string' and entry or '', '^%S+ (%S+) %S+ %S+ %S+ (.*)$')
	local till = channel and redis.pcall('ZSCORE', KEYS[5], channel)
	if type(till) == 'string' and tonumber(till) > now then reply[#reply + 1] = owner end
end
return reply
