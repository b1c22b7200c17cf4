-- probe: publish to the client's channel, to detect whether this server counts its subscription.
--
-- KEYS  the keys of a lock
-- ARGV  1 client
--       2 serial of the request: three digits
--
-- Returns  number of receivers .. serial

--:include _publish

local receivers = publish(ARGV[1], 'P:0:0:0:')
if type(receivers) == 'table' then
  return receivers
end
return receivers .. ARGV[2]
