-- Gives this node a mark, or has it keep the one of this run of the server.
-- KEYS: the mark
-- ARGV: the run, the longest term in ms, until when the node may be told to
-- vote at once, by its time in ms, or 0; the mark's own term in ms
-- Returns {mark, the server's time in ms}. A mark is the run, the time from
-- which the node votes, and the longest term that anybody may ask for.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local longest = tonumber(ARGV[2])
local run, from, known = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%d+) (%d+)$')
if run ~= ARGV[1] then
	-- Who asked for a longer term than ours has left its own in the old mark.
	longest = math.max(longest, tonumber(known) or 0)
	from = now + longest
else
	from, known = tonumber(from), tonumber(known)
	if from > now and longest > known then from = from + longest - known end
	longest = math.max(longest, known)
end
if now < tonumber(ARGV[3]) then from = 0 end
local mark = string.format('%s %.0f %.0f', ARGV[1], from, longest)
redis.call('SET', KEYS[1], mark, 'PX', ARGV[4])
return {mark, string.format('%.0f', now)}
