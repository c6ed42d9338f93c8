-- Removes a hold, whoever has it, and hands the key to the next waiter.
-- Returns {1} and what pass says.
redis.call('DEL', lock)
return {1, unpack(pass('', 0, ''))}
