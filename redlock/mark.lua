-- Gives this node a mark, or keeps the mark that this run of the server has.
-- KEYS: the mark
-- ARGV: the longest term in ms; 1 if a restarted server keeps its mark; the run
-- that may vote at once; the server's time in ms until which it may; the mark
-- whose wait is over, or ''; 1 if a node without a mark stays without one
-- Returns {mark or '', this run, the server's time in ms}. A mark is "run from longest":
-- the run, the time from which it votes, the longest term of any caller in ms.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local this = string.match(redis.call('INFO', 'server'), '\nrun_id:(%S+)') or 'unknown'
local old = redis.call('GET', KEYS[1])
if not old and ARGV[6] == '1' then return {'', this, string.format('%.0f', now)} end

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
	if from > 0 and longest > known then
		-- The wait counted a shorter term than the one that is known now, so it is not over.
		from = from + longest - known
	elseif old == ARGV[5] then
		from = 0
	end
	longest = math.max(longest, known)
	-- The clock may have been ahead when the mark was made.
	from = math.min(from, now + longest)
else
	-- The old mark may name a longer term, of a driver with a larger max_ttl.
	longest = math.max(longest, tonumber(known) or 0)
	run, from = this, now + longest
end

if this == ARGV[3] and now < tonumber(ARGV[4]) then from = 0 end
local mark = string.format('%s %.0f %.0f', run, from, longest)
-- The mark never expires, because a set whose holds are only renewed must not look new.
redis.call('SET', KEYS[1], mark)
return {mark, this, string.format('%.0f', now)}
