-- inspect: read the holder of a lock, without any change. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter, then the lock's other keys
-- ARGV  1 serial of the request: three digits
--
-- Returns  {serial}  the lock is free
--          {holder's token, left, last fence or '', serial}  left is -1 if it never expires

local holder = redis.call('GET', KEYS[1])
if not holder then
  return {ARGV[1]}
end
return {holder, redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or '', ARGV[1]}
