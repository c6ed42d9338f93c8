-- Reads records and entries. It needs shared.lua of redisstore.
-- KEYS: the lock, its fence counter, the queue, its timeouts, the mark of a mixed key (a script
-- that uses the record alone gets only the lock)
--
-- The record is "fairlock", a mark, and " since token fence term owner". The mark is + if callers
-- may wait, and otherwise -. Since has 13 digits. It is 0 if the script that granted the key did
-- not read the clock. Then the start follows from the term and the PTTL, until a script prolongs
-- the hold. The record of shared holds is a sorted set; see shared.lua.
local lock, counter, queue, timeouts, mixed = unpack(KEYS)
local time
local shared -- whether the key has a shared record; set by holder, and by what changes the record

-- Returns the server's clock in ms.
local function now()
	time = time or redis.call('TIME')
	return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function wrongtype(reply) return string.find(reply.err, 'WRONGTYPE', 1, true) end

-- Returns token, command, channel, round, term, flags, and owner of an entry of the queue; or nil
-- if it is no entry. The flags are one digit: 1 if fenced, and 2 more if shared.
local function parse(entry) return string.match(entry, '^(%S+) (%S+) (%S+) (%S+) (%d+) ([0-3]) (.*)$') end

local function isShared(flags) return tonumber(flags) >= 2 end

-- Returns when a hold began, if nothing has prolonged it. Left is the rest of its term. The result
-- has 13 digits, so it must not be negative, even if a program has shortened a term of many years.
local function start(left, term) return string.format('%013.0f', math.max(now() + math.min(left - term, 0), 1)) end

-- Returns token, owner, fence, mark, since and term of the hold; true if the record is not of this
-- strategy; true and the owner of one holder if the record is shared; or nil if the key is free. R
-- is the value, if the script has read it.
local function holder(r)
	shared = nil
	-- Read only 4096 bytes, because the value of another program may be long.
	r = r or redis.pcall('GETRANGE', lock, '0', '4095')
	if type(r) ~= 'string' then
		if not wrongtype(r) then redis.call('GETRANGE', lock, 0, 0) end -- ends the script by the error
		local member = readers(lock, now())
		if member == false then return end
		shared = member and true
		return true, shared and string.match(member, '#(.*)$')
	end
	if r == '' then return redis.call('EXISTS', lock) == 1 or nil end
	local mark, since, token, fence, term, owner = string.match(r, '^fairlock([-+]) (%d+) (%S+) (%d+) (%d+) (.*)$')
	if not token then return true end
	return token, owner, fence, mark, since, term
end
