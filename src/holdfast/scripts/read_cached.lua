-- read_cached: read a cached value, without any change. Times in ms.
--
-- KEYS  1 value: '<fence> <stale> <cost>\n' and the payload (see store)
-- ARGV  1 serial of the request: three digits
--
-- Returns  {serial}               there is no value
--          {value, left, serial}  left is the time until the key expires
--
-- It uses one key only, so that a cluster serves it even while the slot is being migrated.

local value = redis.call('GET', KEYS[1])
if not value then
  return {ARGV[1]}
end
return {value, redis.call('PTTL', KEYS[1]), ARGV[1]}
