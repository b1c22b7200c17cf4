-- end_quarantine: end this server's quarantine early (see guard), for an operator. Times in ms.
--
-- KEYS  1 restart marker: '<marker> <longest ttl>', without expiry
--       2 quarantine
-- ARGV  1 marker of this server
--       2 longest ttl that locks may have
--       3 serial of the request: three digits
--
-- Returns  1 .. serial
--
-- The operator asserts that no client holds a lock that this server has lost. A longer ttl that is
-- stored already is kept.

local call = redis.call
local known_longest = string.match(call('GET', KEYS[1]) or '', '^%S+ (%d+)$')
local longest = math.max(tonumber(ARGV[2]), tonumber(known_longest or 0))
call('SET', KEYS[1], ARGV[1] .. ' ' .. string.format('%.0f', longest))  -- `..` writes 1e15 as 1e+15
call('DEL', KEYS[2])
return '1' .. ARGV[3]
