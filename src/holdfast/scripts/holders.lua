-- holders: read the holders of a semaphore or an rwlock, without any change. Times in ms.
--
-- KEYS  1 holders (see _holders), then the other keys
-- ARGV  1 serial of the request: three digits
--
-- Returns  {holders, serial}  tokens, each followed by the time left of its lease; the first to
--                             expire comes first

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holders = redis.call('ZRANGE', KEYS[1], now, '+inf', 'BYSCORE', 'WITHSCORES')
for index = 2, #holders, 2 do
  holders[index] = holders[index] - now
end
return {holders, ARGV[1]}
