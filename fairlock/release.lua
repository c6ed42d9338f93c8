-- Releases a key if the token holds it, and hands the key to the next waiter. If the token does not
-- hold it, ends the token's place.
-- KEYS: see record.lua
-- ARGV[2..]: the token, or token#owner for a shared hold; the rest of the term in ms if the key
-- stays taken, and otherwise ''
-- Returns 1, or 0 if the token does not hold the key.

-- A hold that no caller waits for needs none of the functions below, which Lua would create in each
-- run.
local record = redis.pcall('GETRANGE', KEYS[1], '0', '4095')
if ARGV[3] == '' and type(record) == 'string' and string.match(record, '^fairlock%- %d+ (%S+) %d+ %d+ ') == ARGV[2] then
	redis.call('DEL', KEYS[1])
	return 1
end
-- include fence shared record queue grant offer handover
local token, alone, owner = string.match(ARGV[2], '^([^#]*)(#?)(.*)$')
alone = alone == ''
local has, whose, fence, mark, since, lasts = holder(record)
local member = not alone and shared and find(lock, token .. '#', owner, now())
if not member and not (alone and has == token) then
	local ended = redis.pcall('ZREM', timeouts, token)
	-- A value of another type is no queue.
	if type(ended) == 'table' and not wrongtype(ended) then return ended end
	if ended == 1 then
		tidy()
		-- The client of this token may have been the only one to poll for a free key, or at the end
		-- of a kept record. So have another client poll.
		if not has or string.find(tostring(has), '^kept%-') then pcall(wakeFirst) end
	end
	-- The token may have waited for the end of a shared record, and so kept back others that can
	-- join it.
	if shared then pcall(handOver, '') end
	return 0
end
if member then
	quit(member)
	-- If other holders are left, the first waiter waits for them.
	if not shared then pcall(handOver, '') end
	return 1
end
if ARGV[3] ~= '' then
	if tonumber(since) == 0 then since = start(redis.call('PTTL', lock), lasts) end
	-- No claim has the new token, so no late command changes this record. A Redis without memory
	-- refuses a SET that is the script's first write, so PEXPIRE comes first.
	redis.call('PEXPIRE', lock, ARGV[3])
	redis.call('SET', lock, 'fairlock' .. mark .. ' ' .. table.concat({since, 'kept-' .. token, fence, ARGV[3], whose}, ' '), 'PX', ARGV[3])
	-- The client that is woken polls again at the end of the term. That poll hands the key over.
	if mark == '+' then pcall(wakeFirst) end
	return 1
end
-- A grant replaces the record. Without a grant, the key becomes free.
local ok = pcall(handOver, '')
if not granted then
	redis.call('DEL', lock)
	-- A Redis without memory has refused the SET of the new record, as the script's first write.
	-- After DEL it accepts it.
	if not ok then pcall(handOver, '') end
end
return 1
