-- Begins a script that takes the key for one holder: any record on this node is in its way.
local held = redis.call('EXISTS', KEYS[1]) == 1
local taken, shares = held, false
