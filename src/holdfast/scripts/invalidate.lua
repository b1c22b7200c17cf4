-- invalidate: delete a cached value, and discard a computation in progress. Times in ms.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 value (see store)
-- ARGV  1 ttl of the lock
--       2 serial of the request: three digits
--
-- Returns  1 .. serial
--
-- The fence counter is raised as if the lock had been granted. A client that computes under an
-- earlier fence then cannot store its value (see store), even if the counter has expired by that
-- time.

local call, ttl = redis.call, tonumber(ARGV[1])
--:include _fence
--:include _expire_counter
expire_counter(new_fence())
call('DEL', KEYS[4])
return '1' .. ARGV[2]
