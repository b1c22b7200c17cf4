-- store: store a value computed under the lock, and notify all waiters. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 value: '<fence> <stale> <cost>\n' and the payload
-- ARGV  1 token
--       2 fence of its lease
--       3 life of the value
--       4 '<stale> <cost>': how much of its life is beyond its ttl, and how long it took to compute
--       5 payload
--       6 serial of the request: three digits
--
-- Returns  1 .. serial  stored
--          0 .. serial  not stored, because the value may be too old: the token does not hold the
--                       lock any more, or an invalidation has raised the fence counter
--
-- Waiters are not granted the lock one by one, because they want the value and not the lock. All
-- are removed from the queue and notified to send their request, which finds the value. The counter
-- expires after a minute instead of an hour, because there may be many values.

local call = redis.call
local lock, queue, token, fence, serial = KEYS[1], KEYS[3], ARGV[1], ARGV[2], ARGV[6]
if call('GET', lock) ~= token or call('GET', KEYS[2]) ~= fence then
  return '0' .. serial
end
call('SET', KEYS[4], fence .. ' ' .. ARGV[4] .. '\n' .. ARGV[5], 'PX', ARGV[3])
--:include _expire_counter
expire_counter(fence)

--:include _notify_all

notify_all()
return '1' .. serial
