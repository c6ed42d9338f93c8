-- Ends a hold, if the token holds the key, leaves the key taken, and removes the given entries from
-- the queue. The first waiter that has a subscription polls then, and learns the new end of the term.
-- This part follows record.lua.
-- KEYS: see record.lua
-- ARGV: the token, the rest of the term in ms, and entries of the token that may be in the queue
-- Returns 1, or 0 if the token does not hold the key.
local token, owner, fence, mark, since, lasts = holder()
if token ~= ARGV[1] then return 0 end
if tonumber(since) == 0 then since = start(redis.call('PTTL', lock), lasts) end
-- No claim has the new token, so no late command finds its own. Without memory, Redis refuses SET
-- before a script has written anything, so PEXPIRE comes first.
redis.call('PEXPIRE', lock, ARGV[2])
redis.call('SET', lock, 'fairlock' .. mark .. ' ' .. table.concat({since, 'kept-' .. token, fence, ARGV[2], owner}, ' '), 'PX', ARGV[2])
if ARGV[3] then redis.pcall('ZREM', queue, unpack(ARGV, 3)) end
if mark == '-' then return 1 end
-- The client that learns of the end hands the key over then, to whichever waiter is first.
local entries = redis.pcall('ZRANGE', queue, 0, 31)
for _, entry in ipairs(entries) do
	local waiter, command, channel = parse(entry)
	local count = waiter and command ~= '-' and redis.pcall(command, channel, waiter .. ' look')
	if type(count) == 'number' and count > 0 then break end
end
return 1
