-- overview: read the complete state of a lock, without any change. Times in ms or µs as given.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 holds of the owner, if there is one
-- ARGV  1 how many waiters to return, in the order of the queue, without those that are gone; -1
--         for all waiters
--       2 serial of the request: three digits
--
-- Returns  {holder's token or '', left (ms), last fence or '', time (µs), holds, waiting, gone,
--          waiters, serial}
--              left     -1 if the lock never expires, -2 if it is free
--              time     the server's time
--              holds    tokens, each followed by its expiry (ms), as in _owner
--              waiting  number of waiters whose client is subscribed, or may be
--              gone     number of waiters whose client is not subscribed
--              waiters  tokens (see _notify), each followed by its ticket (µs) and by whether its
--                       client is subscribed: 1 yes, 0 no, -1 unknown

--:include _waiters
return {
  call('GET', KEYS[1]) or '', call('PTTL', KEYS[1]), call('GET', KEYS[2]) or '', now_in(1000000),
  call('ZRANGE', KEYS[4], '(' .. now_in(1000), '+inf', 'BYSCORE', 'WITHSCORES'),
  waiting, gone, waiters, ARGV[2]
}
