-- finish: store the result of a run, release its lock, and notify all waiters. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 result: '<fence> <empty> 0\n' and the payload, in the format of a cached value (see store)
-- ARGV  1 token
--       2 fence of its lease
--       3 life of the result
--       4 '<empty> 0': empty is 1 if the run set no result
--       5 payload
--       6 life of the tombstone, 0 for none
--       7 serial of the request: three digits
--
-- Returns  1 .. serial  stored, by this request or by an earlier one
--          0 .. serial  not stored: the token does not hold the lock any more
--
-- Invariant: while a result is there, the lock is free and no caller waits for it.
-- Holder: it stores the result, and releases the lock.
-- Caller: it finds no result, and requests the lock.
-- With two requests instead of one script, a holder that crashes between them would keep the lock,
-- and a release that came first would let the next caller run again.
--
-- A retry finds the fence of its lease in the result: no other lease has that fence.

local call = redis.call
local lock, queue, token, fence, serial = KEYS[1], KEYS[3], ARGV[1], ARGV[2], ARGV[7]
if call('GET', lock) ~= token or call('GET', KEYS[2]) ~= fence then
  local result = call('GET', KEYS[4])
  return (result and string.match(result, '^%d+') == fence and '1' or '0') .. serial
end
call('SET', KEYS[4], fence .. ' ' .. ARGV[4] .. '\n' .. ARGV[5], 'PX', ARGV[3])
call('DEL', lock)

--:include _released
--:include _expire_counter
--:include _notify_all
--:include _tombstone

mark_released(true)
expire_counter(fence)
notify_all()
if ARGV[6] ~= '0' then
  add_tombstone(token, tonumber(ARGV[6]))
end
return '1' .. serial
