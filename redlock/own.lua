-- This part finds a caller's members of a shared record. The text of redisstore's shared.lua
-- comes before it.

-- own returns the members that have a prefix: token# or token~n# for one attempt, the token
-- alone for any.
local function own(lock, prefix, owner)
	if string.sub(prefix, -1) == '#' then return {find(lock, prefix, owner)} end
	local all = {}
	for _, member in ipairs(redis.call('ZRANGE', lock, 0, -1)) do
		-- After the token comes #owner or ~n#owner. Anything else is a longer token.
		local rest = string.sub(member, #prefix + 1)
		if string.sub(member, 1, #prefix) == prefix and (string.find(rest, '^#') or string.find(rest, '^~%d+#')) then
			all[#all + 1] = member
		end
	end
	return all
end
