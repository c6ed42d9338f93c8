-- Keeps a client's places in the queue alive, reports them, and hands over a key that is free or has a
-- shared record.
-- KEYS: see record.lua
-- ARGV[2..]: PUBLISH, SPUBLISH or - for the command that publishes to the client, channel, window in ms,
-- the position in the queue to begin at and the entry before it, and the client's entries, if any
-- Returns what report returns.
local found = ''
for i = 7, #ARGV do found = found .. (redis.call('ZSCORE', queue, ARGV[i]) and 1 or 0) end
if string.find(found, '1', 1, true) then keepAlive(ARGV[3], ARGV[4]) end
local has, whose, fence = holder()
if has and not shared then return report(nil, found, ARGV[2], ARGV[3], nil, has, whose, fence) end
local handed = {}
for i = 7, shared and #ARGV or 0 do
	local token, _, _, round, term, flags, owner = parse(ARGV[i])
	local member = token .. '#' .. owner
	-- The message about the grant was lost, or is late. Its fence is not stored, so draw a new one.
	if string.sub(found, i - 6, i - 6) == '0' and isShared(flags) and redis.call('ZSCORE', lock, member) then
		fence = grant(token, owner, term, flags)
		if not fence then quit(member) end
		for _, field in ipairs({fence and 1 or -1, token, round, fence or '0'}) do handed[#handed + 1] = field end
	end
end
return report(nil, found, ARGV[2], ARGV[3], handOver(ARGV[3], ARGV[5], ARGV[6], handed))
