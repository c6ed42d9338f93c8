-- Gives this node a mark, or has it keep the one of this run of the server.
-- KEYS: the mark
-- ARGV: the longest term in ms; 1 if a restarted server keeps its mark; a run
-- that may vote at once; the server's time in ms until which it may; the mark
-- whose wait is over, or ''
-- Returns {mark, this run, the server's time in ms}. A mark is the run, the
-- time from which the node votes, and the longest term that any caller may ask for.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local this = string.match(redis.call('INFO', 'server'), '\nrun_id:(%S+)') or 'unknown'
local old = redis.call('GET', KEYS[1])
local longest = tonumber(ARGV[1])
local run, from, known = string.match(old or '', '^(%S+) (%d+) (%d+)$')
local kept = run and run == this
if run and not kept and ARGV[2] == '1' then
	-- A server that was a replica in this run may lack what its master had.
	local info = redis.pcall('INFO', 'replication')
	kept = type(info) ~= 'string' or not string.find(info, '\nsecond_repl_offset:%d')
end
if kept then
	from, known = tonumber(from), tonumber(known)
	if from > now and longest > known then from = from + longest - known end
	longest = math.max(longest, known)
	-- If the clock was ahead when the mark was made, wait for the longest term only.
	from = math.min(from, now + longest)
	if old == ARGV[5] then from = 0 end
else
	-- A driver with a longer term than ours has written it into the old mark.
	longest = math.max(longest, tonumber(known) or 0)
	run, from = this, now + longest
end
if this == ARGV[3] and now < tonumber(ARGV[4]) then from = 0 end
local mark = string.format('%s %.0f %.0f', run, from, longest)
-- A mark never expires. If it expired during a hold that is only renewed, the
-- node would look new.
redis.call('SET', KEYS[1], mark)
return {mark, this, string.format('%.0f', now)}
