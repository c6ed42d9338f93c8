-- Releases a key, if the token holds it. If the caller asks, it also finds out which command
-- the user may send to delete a key that has a given value.
-- KEYS: the lock
-- ARGV: the token with '#' after it; a channel if Spring's registry listens there; or '' and
--   a third argument if the caller asks
-- Returns 1, or 0 if the token does not hold the key. If it frees the key and the caller
-- asks, it returns {1, command}, with '' if there is none.
local record = redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1] - 1)
if type(record) ~= 'string' then
	if not string.find(record.err, 'WRONGTYPE', 1, true) then return record end
	return 0
end
if record ~= ARGV[1] then return 0 end
-- The record is small, so UNLINK would save nothing.
local freed = redis.call('DEL', KEYS[1])
-- The key is free even if this user may not publish.
if ARGV[2] and ARGV[2] ~= '' then redis.pcall('PUBLISH', ARGV[2], KEYS[1]) end
if not ARGV[3] then return freed end
-- acl_check_cmd raises an error if the server does not have the command. It executes
-- nothing, and the ACL log does not get an entry. Redis 5 and 6 do not have it.
for _, command in ipairs({{'delex', KEYS[1], 'ifeq', ''}, {'delifeq', KEYS[1], ''}}) do
	local known, allowed = pcall(redis.acl_check_cmd, unpack(command))
	if known and allowed then return {freed, command[1]} end
end
return {freed, ''}
