-- Reports the state of a lock. This part follows handover.lua.

local kept = 0 -- until when this call keeps the client's places, by the server's clock in ms

-- Returns {1 if the asking token holds the key and otherwise 0, PTTL, 1 if the holder is of another
-- strategy and 2 if the record is shared, 1 if the client's channel has no subscriber, token, fence
-- and owner of the hold, for each queried token 1 if it is in the queue and otherwise 0, kept},
-- followed by what handOver returned. The script passes that list, if it called handOver, or else
-- the holder. A brief report leaves out what another report to the client has said or will say
-- soon: its PTTL is -3, and the subscriber is not checked.
local function report(asking, found, command, channel, handed, token, owner, fence, brief)
	if handed then token, owner, fence = holder() end
	local foreign = shared and 2 or token == true and 1 or 0
	if foreign == 1 then redis.pcall('SET', mixed, '1', 'PX', 2000) end -- see yields in handover.lua
	-- A shared record has many holders, of which holder returns no token. If this call has made the
	-- asking token a holder, the report names that token.
	if shared and handed and handed[1] == 1 and handed[2] == asking then token, fence = asking, handed[4] end
	if token == true or not token then token = '' end
	local mine = token == asking and 1 or 0
	local lost = not brief and unsubscribed(command, channel) and 1 or 0
	return {mine, brief and -3 or redis.call('PTTL', lock), foreign, lost, token, fence or '0', owner or '', found, kept, unpack(handed or {})}
end
