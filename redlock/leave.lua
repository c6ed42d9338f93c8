-- Removes a waiter from the queue. If the key is free, wakes the next one.
-- KEYS: the lock, the queue's turns, looks and sign
-- ARGV: the waiter, the channel
-- Returns 1.
remove(KEYS[2], KEYS[3], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then wake(KEYS[2], KEYS[3], ARGV[2], 'left') end
return 1
