-- Takes a free key, for a caller that was refused a moment ago. The text of redisstore's
-- look.lua comes before this part.
-- KEYS: the lock
-- ARGV: the record, the term in ms, the first 1,024 bytes of the record that was found
-- Returns {1, ''}; 0 if the key still has that record; or {0, PTTL, the first 1,024
-- bytes of the value} if it has another value, with '' if that is no string. If it has a
-- shared record, a member follows.
local found = redis.pcall('GETRANGE', KEYS[1], 0, 1023)
if found == ARGV[3] then return 0 end
-- An empty string, or a value of another type, also holds the key.
if found == '' and redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'NX') then return {1, ''} end
if type(found) == 'string' then return {0, redis.call('PTTL', KEYS[1]), found} end
return {0, redis.call('PTTL', KEYS[1]), '', look(KEYS[1], 1)[1]}
