-- position: who holds the lock, and how many waiters are ahead of one. Changes nothing.
--
-- KEYS  1 lock  2 fence counter  3 queue, and the rest of a lock's keys
-- ARGV  1 ticket of the waiter  2 serial of the request
--
-- Returns  {holder's token or '', left (ms), waiters ahead, serial}
--          left is -1 if it never expires; no more than 100 waiters are counted, so that a long queue
--          does not cost the server more

local ahead = redis.call('ZRANGE', KEYS[3], '-inf', '(' .. ARGV[1], 'BYSCORE', 'LIMIT', 0, 100)
return {redis.call('GET', KEYS[1]) or '', redis.call('PTTL', KEYS[1]), #ahead, ARGV[2]}
