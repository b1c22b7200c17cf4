-- claim: return a cached value, or acquire the lock to compute it. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 value (see store)
-- ARGV  1 to 4 as acquire
--       5 fence of the last value that the caller has seen and rejects, or 0
--       6 serial of the request: three digits
--
-- Returns  {value, left, serial}  a newer value; the caller has no lock and no place in the queue
--          otherwise as acquire
--
-- Invariant: no caller waits in the queue for a value that is already stored.
-- Caller: it finds no value, and joins the queue.
-- Holder: it stores the value, notifies all waiters, and removes them from the queue (see store).
-- With two requests instead of one script, the holder could store the value between them, and no
-- message would reach the caller.

local value = redis.call('GET', KEYS[4])
local fence = value and string.match(value, '^(%d+) %d+ %d+\n')
if fence and tonumber(fence) > tonumber(ARGV[5]) then
  return {value, redis.call('PTTL', KEYS[4]), ARGV[6]}
end

--:include acquire
