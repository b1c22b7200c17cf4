-- barrier_state: read a barrier, without any change. Times in ms.
--
-- KEYS  1 barrier (see _barrier)
-- ARGV  1 serial of the request: three digits
--
-- Returns  {parties that wait, '<reason> <token>' if it is broken or '', serial}; if the lease of a party
--          has expired, it is broken, although no script has found that yet

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local waiting = call('ZRANGE', KEYS[1], 0, '(1e16', 'BYSCORE', 'WITHSCORES')
local mark = call('ZRANGE', KEYS[1], '1e16', '+inf', 'BYSCORE')[1]
if waiting[1] and tonumber(waiting[2]) < now then
  return {0, 'lost ' .. waiting[1], ARGV[#ARGV]}
end
return {#waiting / 2, mark or '', ARGV[#ARGV]}
