-- This part finds the records of a token. The text of redisstore's shared.lua comes before it.
-- A prefix is token# or token~n# for one attempt, or the token alone for all its attempts.

-- begins reports whether a record has a prefix.
local function begins(record, prefix)
	if string.sub(record, 1, #prefix) ~= prefix then return false end
	-- After a token alone comes #owner or ~n#owner. Anything else is a longer token.
	local rest = string.sub(record, #prefix + 1)
	return string.sub(prefix, -1) == '#' or string.find(rest, '^#') or string.find(rest, '^~%d+#')
end

-- owns reports whether the record of a key is not shared and has a prefix. If the key cannot be
-- read, it returns nil and the error.
local function owns(lock, prefix)
	local record = redis.pcall('GETRANGE', lock, 0, #prefix + 15)
	if type(record) == 'string' then return begins(record, prefix) end
	if string.find(record.err, 'WRONGTYPE', 1, true) then return false end
	return nil, record
end

-- own returns the members of a shared record that have a prefix.
local function own(lock, prefix, owner, now)
	if string.sub(prefix, -1) == '#' then return {find(lock, prefix, owner, now)} end
	local all = {}
	for _, member in ipairs(members(lock, now, 0)) do
		if begins(member, prefix) then all[#all + 1] = member end
	end
	return all
end
