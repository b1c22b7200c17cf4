-- invalidate: forget a value, and whatever is being computed of it just now.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 value
-- ARGV  1 ttl of the lock (ms)  2 serial of the request
--
-- Returns  1 .. serial
--
-- The counter goes on, as if the lock had been granted: whoever computes under an earlier fence finds
-- that it may not store (see store), also when the counter has expired by then.

local call, ttl = redis.call, tonumber(ARGV[1])
--:include _fence
new_fence()
call('PEXPIRE', KEYS[2], 60000)
call('DEL', KEYS[4])
return '1' .. ARGV[2]
