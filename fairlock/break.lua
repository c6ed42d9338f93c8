-- Removes any hold of a key, and hands the key to the next waiter.
-- KEYS: see record.lua
-- ARGV: see record.lua
-- Returns {1} and what handOver returns.
redis.call('DEL', lock)
return {1, unpack(handOver('', 0, ''))}
