-- Reports the holder of a key and its waiters.
-- KEYS: see record.lua
-- ARGV: how many entries of the queue it reads at most
-- Returns {PTTL, owner, since in ms, fence, how many owners of shared holds follow, these owners,
-- owners of the first waiters in order}, with '' for what does not exist. A PTTL of -2 means that
-- the key is free, and -1 that it has no end.
-- include shared record
local fence = redis.pcall('GETRANGE', counter, 0, 16)
local ok, token, owner, _, _, since, lasts = pcall(holder)
local left = redis.call('PTTL', lock)
-- Until the first renewal, the start follows from what is left of the term.
if ok and since and tonumber(since) == 0 then since = left >= 0 and start(left, lasts) or '' end
local members = ok and shared and look(lock, 1000) or {}
local kept = ok and type(token) == 'string' and string.sub(token, 1, 5) == 'kept-'
local reply = {left, ok and not shared and owner or '', ok and since or '', type(fence) == 'string' and fence or '', kept and -1 or #members}
for _, member in ipairs(members) do reply[#reply + 1] = string.match(member, '#(.*)$') end
-- A value of another type is no queue.
local entries, tokens, owners = redis.pcall('LRANGE', queue, 0, ARGV[1] - 1), {}, {}
if entries.err and not wrongtype(entries) then return entries end
for _, entry in ipairs(entries) do
	local token, _, _, _, _, _, owner = parse(entry)
	if token then tokens[#tokens + 1], owners[#owners + 1] = token, owner end
end
local tills = tokens[1] and redis.pcall('ZMSCORE', timeouts, unpack(tokens)) or {}
for i, owner in ipairs(owners) do
	-- A place counts until its timeout.
	if tills[i] and tonumber(tills[i]) > now() then reply[#reply + 1] = owner end
end
return reply
