-- overview_waited: read the complete state of a barrier or a latch, without any change. Times in ms or µs
-- as given.
--
-- KEYS  1 barrier (see _barrier) or latch (see _latch)
--       2 fence counter, which they do not use
--       3 queue
-- ARGV  as overview
--
-- Returns  {parties, progress, time (µs), waiting, gone, waiters, serial}
--              parties   of a barrier: tokens, each followed by when its lease expires (ms)
--              progress  of a barrier: '<reason> <token>' if it is broken; of a latch that is not open:
--                        '<how many are left> <count>'; otherwise ''
--              the others as overview

--:include _waiters
local lock, parties, progress = KEYS[1], {}, ''
if string.sub(lock, -8) == ':barrier' then
  local lost = call('ZRANGE', lock, 0, '(' .. now_in(1000), 'BYSCORE', 'LIMIT', 0, 1)[1]
  progress = call('ZRANGE', lock, '1e16', '+inf', 'BYSCORE')[1] or lost and 'lost ' .. lost or ''
  parties = call('ZRANGE', lock, now_in(1000), '(1e16', 'BYSCORE', 'WITHSCORES')
else
--:include _latch
  local made, counted = read_latch()
  if made and counted < made then
    progress = made - counted .. ' ' .. made
  end
end
return {parties, progress, now_in(1000000), waiting, gone, waiters, ARGV[2]}
