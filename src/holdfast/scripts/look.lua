-- look: what is kept of a value. Changes nothing.
--
-- KEYS  1 value: '<fence> <stale, ms> <cost, ms>\n' and the payload (see store)
-- ARGV  1 serial of the request
--
-- Returns  {serial}                    nothing
--          {value, left (ms), serial}  it is forgotten when so much time has passed
--
-- One key only: so a cluster serves it also while its slot moves.

local value = redis.call('GET', KEYS[1])
if not value then
  return {ARGV[1]}
end
return {value, redis.call('PTTL', KEYS[1]), ARGV[1]}
