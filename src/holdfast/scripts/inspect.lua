-- inspect: who holds the lock. Changes nothing.
--
-- KEYS  1 lock  2 fence counter, and the rest of a lock's keys
-- ARGV  1 serial of the request
--
-- Returns  {serial}                                    nobody holds it
--          {holder's token, left (ms), last fence or '', serial}  left is -1 if it never expires

local holder = redis.call('GET', KEYS[1])
if not holder then
  return {ARGV[1]}
end
return {holder, redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or '', ARGV[1]}
