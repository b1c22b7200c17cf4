-- store: keep the value that was computed under the lock, and have all who wait for it look.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 value
-- ARGV  1 token  2 fence of its lease  3 life of the value (ms)  4 head: '<stale, ms> <cost, ms>', how
--       much of its life is beyond its ttl, and how long it took to compute  5 payload  6 serial of
--       the request
--
-- Returns  1 .. serial  it is kept
--          0 .. serial  it may be too old: the lock is not this token's any more, or the counter has
--                       gone on, because the value was invalidated. Nothing was changed
--
-- Those in line are not granted the lock one after the other: they do not want it any more. All are
-- taken out and told to ask, which finds the value. The counter is not needed for long: a lock has it
-- for an hour, but there may be many values.

local call = redis.call
local lock, queue, token, fence, serial = KEYS[1], KEYS[3], ARGV[1], ARGV[2], ARGV[6]
if call('GET', lock) ~= token or call('GET', KEYS[2]) ~= fence then
  return '0' .. serial
end
call('SET', KEYS[4], fence .. ' ' .. ARGV[4] .. '\n' .. ARGV[5], 'PX', ARGV[3])
call('PEXPIRE', KEYS[2], 60000)

local delay, quiet = 0, true
--:include _tell

repeat
  local line = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1000)
  for _, waiter in ipairs(line) do
    tell(waiter, 'A', 0, 0)
  end
  if #line > 0 then
    call('ZREM', queue, unpack(line))
  end
until #line < 1000
return '1' .. serial
