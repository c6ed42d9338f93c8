-- Removes any hold of a key, and hands the key to the next waiter.
-- KEYS: see record.lua
-- ARGV: see record.lua
-- include fence shared record queue grant offer handover
redis.call('DEL', lock)
handOver('')
return 1
