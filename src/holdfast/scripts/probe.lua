-- probe: publish to the client's own channel, to learn whether this server counts its listeners.
--
-- KEYS  those of a lock
-- ARGV  1 client  2 serial of the request
--
-- Returns  listeners counted .. serial

--:include _publish

local heard = publish(ARGV[1], 'P:0:0:0:')
if type(heard) == 'table' then
  return heard
end
return heard .. ARGV[2]
