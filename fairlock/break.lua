-- Removes any hold of a key, and hands the key to the next waiter.
-- KEYS: see record.lua
-- ARGV: see record.lua
redis.call('DEL', lock)
handOver('')
return 1
