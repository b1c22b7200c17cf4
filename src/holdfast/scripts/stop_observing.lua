-- stop_observing: remove a token from the queue of the observers of an election. Times in ms.
--
-- KEYS  as observe
-- ARGV  1 token
--       2 ttl, not used
--       3 life of the tombstone, 0 for none; what may follow it is not used (see release)
--       4 settings, not used
--       5 serial of the request: three digits
--
-- Returns  0 .. serial  as the release of a token that does not hold the lock

local call, queue, token = redis.call, KEYS[1], ARGV[1]
local tombstone_ms = string.match(ARGV[3], '^%d+')
--:include _tombstone
call('ZREM', queue, token, '!' .. token)
if tombstone_ms ~= '0' then
  add_tombstone(token, tonumber(tombstone_ms))
end
return '0' .. ARGV[5]
