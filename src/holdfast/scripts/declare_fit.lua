-- declare_fit: end the quarantine of this server, because an operator says that no lock can be held
-- that it has lost (see guard).
--
-- KEYS  1 home: '<mark> <longest ttl, ms>', for ever  2 quarantine
-- ARGV  1 mark of this server  2 longest ttl that locks may have (ms)  3 serial of the request
--
-- Returns  1 .. serial
--
-- The longest ttl ever given is kept.

local call = redis.call
local before = string.match(call('GET', KEYS[1]) or '', '^%S+ (%d+)$')
local longest = math.max(tonumber(ARGV[2]), tonumber(before or 0))
call('SET', KEYS[1], ARGV[1] .. ' ' .. string.format('%.0f', longest))  -- `..` writes 1e15 as 1e+15
call('DEL', KEYS[2])
return '1' .. ARGV[3]
