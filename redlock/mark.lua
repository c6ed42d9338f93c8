-- Gives this node a mark, or keeps the mark that this run of the server has. The text of clock.lua
-- comes before this part.
-- KEYS: the mark
-- ARGV: the longest term in ms; the run that may vote at once; the server's time in ms until which
-- it may; 1 if a node without a mark stays without one; 1 if the server may evict keys
-- Returns {mark or '', this run, the server's time in ms}, or an error if the server must never
-- vote. A mark is "run from longest": the run, the time from which it votes, the longest term of
-- any caller in ms.
local info = redis.pcall('INFO')
if type(info) ~= 'string' then info = redis.call('INFO', 'server') end -- a user may have no more rights
local function field(name) return string.match(info, '\n' .. name .. ':(%S+)') end
if field('role') == 'slave' then
	return redis.error_reply('ERR it is a replica, so it does not vote: name the master')
end
local policy = field('maxmemory_policy') or 'noeviction'
if policy ~= 'noeviction' and field('maxmemory') ~= '0' and ARGV[5] ~= '1' then
	return redis.error_reply('ERR it may evict locks, so it does not vote: its maxmemory-policy is ' .. policy)
end

local now = clock()
local this = field('run_id') or 'unknown'
local old = redis.call('GET', KEYS[1])
if not old and ARGV[4] == '1' then return {'', this, string.format('%.0f', now)} end

local longest = tonumber(ARGV[1])
local run, from, known = string.match(old or '', '^(%S+) (%d+) (%d+)$')
if run and run == this then
	from, known = tonumber(from), tonumber(known)
	if from > 0 and longest > known then
		-- The mark was made with a shorter term than the longest one that is known now. So the node
		-- must wait for the difference as well.
		from = from + longest - known
	end
	longest = math.max(longest, known)
	-- Limit the wait to the longest term. The mark may name a later time, because the clock may
	-- have been ahead when the mark was made.
	from = math.min(from, now + longest)
else
	-- The node has no mark, or one of an earlier run, so it must wait. The old mark may name a
	-- longer term, of a driver with a larger max_ttl.
	longest = math.max(longest, tonumber(known) or 0)
	run, from = this, now + longest
end

if this == ARGV[2] and now < tonumber(ARGV[3]) then from = 0 end
local mark = string.format('%s %.0f %.0f', run, from, longest)
-- The mark never expires, because a set whose holds are only renewed must not look new.
redis.call('SET', KEYS[1], mark)
return {mark, this, string.format('%.0f', now)}
