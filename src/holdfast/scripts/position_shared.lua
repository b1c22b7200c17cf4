-- position_shared: read a holder, and count the waiters before a ticket. Times in ms, tickets in µs.
--
-- KEYS  1 holders (see _holders)
--       2 fence counter
--       3 queue
-- ARGV  as position
--
-- Returns  as position; the holder is the one whose lease expires first
--
-- Changes nothing.

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holders = call('ZRANGE', KEYS[1], now, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
local ahead = call('ZRANGE', KEYS[3], '-inf', '(' .. ARGV[1], 'BYSCORE', 'LIMIT', 0, 100)
return {holders[1] or '', (holders[2] or now) - now, #ahead, ARGV[2]}
