-- inspect: who holds the lock. Changes nothing.
--
-- KEYS  1 lock  2 fence counter
-- ARGV  none
--
-- Returns  {}                                          nobody
--          {holder's token, left (ms), last fence or ''}  left is -1 for a key without expiry

local holder = redis.call('GET', KEYS[1])
if not holder then
  return {}
end
return {holder, redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or ''}
