-- probe: publish to the client's own channel, to learn whether this server counts its listeners.
--
-- KEYS  those of a lock
-- ARGV  1 channel, with a hash tag if it is one of the lock's slot  2 serial of the request
--
-- Returns  listeners counted .. serial

local publish = string.find(ARGV[1], '{', 1, true) and 'SPUBLISH' or 'PUBLISH'
return redis.call(publish, ARGV[1], 'P:0:0:0:') .. ARGV[2]
