-- position: read the holder, and count the waiters before a ticket. Times in ms, tickets in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue, then the lock's other keys
-- ARGV  1 ticket of the waiter
--       2 serial of the request: three digits
--
-- Returns  {holder's token or '', left, waiters ahead, serial}
--              left           -1 if the lock never expires
--              waiters ahead  at most 100, to limit the cost of a long queue
--
-- Changes nothing.

local ahead = redis.call('ZRANGE', KEYS[3], '-inf', '(' .. ARGV[1], 'BYSCORE', 'LIMIT', 0, 100)
return {redis.call('GET', KEYS[1]) or '', redis.call('PTTL', KEYS[1]), #ahead, ARGV[2]}
