-- Begins a script that takes the key shared: only a record that is not shared is in its
-- way. The text of shared.lua comes before this part.
local now = clock()
local members, fence = readers(KEYS[1], now), 0
local held, taken, shares = not members, members ~= 0, true
