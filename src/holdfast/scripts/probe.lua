-- probe: publish to the client's own channel, to learn whether this server counts its listeners.
--
-- ARGV  1 channel  2 serial of the request
--
-- Returns  listeners counted .. serial

return redis.call('PUBLISH', ARGV[1], 'P:0:0:0:') .. ARGV[2]
