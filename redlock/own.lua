-- owns reports whether the record of a key has a prefix. A prefix is token# or token~n# for one
-- attempt, or the token alone for all its attempts. If the key cannot be read, it returns nil and
-- the error.
local function owns(lock, prefix)
	-- 16 bytes after the prefix are enough for the number of an attempt. A foreign value may be
	-- long.
	local record = redis.pcall('GETRANGE', lock, 0, #prefix + 15)
	if type(record) ~= 'string' then
		if string.find(record.err, 'WRONGTYPE', 1, true) then return false end -- another program's value
		return nil, record
	end
	if string.sub(record, 1, #prefix) ~= prefix then return false end
	-- After a token alone comes #owner or ~n#owner. Anything else is a longer token.
	local rest = string.sub(record, #prefix + 1)
	return string.sub(prefix, -1) == '#' or string.find(rest, '^#') or string.find(rest, '^~%d+#')
end
