-- Begins a script that takes the key shared: only a record that is not shared is in its
-- way. The text of shared.lua comes before this part.
local at = clock() -- acquire.lua has another now
local members, fence = readers(KEYS[1], at), 0
local held, taken, shares = not members, members ~= 0, true
