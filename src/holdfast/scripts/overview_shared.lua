-- overview_shared: read the complete state of a semaphore or an rwlock, without any change. Times in ms
-- or µs as given.
--
-- KEYS  1 holders (see _holders)
--       2 fence counter
--       3 queue
-- ARGV  as overview
--
-- Returns  {holders, last fence or '', time (µs), waiting, gone, waiters, serial}
--              holders  tokens, each followed by when its lease expires (ms)
--              the others as overview

--:include _waiters
return {
  call('ZRANGE', KEYS[1], now_in(1000), '+inf', 'BYSCORE', 'WITHSCORES'), call('GET', KEYS[2]) or '',
  now_in(1000000), waiting, gone, waiters, ARGV[2]
}
