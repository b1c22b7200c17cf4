-- latch_leave: end a token that waits for a latch. Times in ms.
--
-- KEYS  as latch_count
-- ARGV  as release
--
-- Returns  0 .. serial

local call = redis.call
local queue, token = KEYS[3], ARGV[1]

--:include _tombstone

call('ZREM', queue, token, '!' .. token)
local tombstone_ms = tonumber(string.match(ARGV[3], '^%d+'))
if tombstone_ms > 0 then
  add_tombstone(token, tombstone_ms)
end
return '0' .. ARGV[#ARGV]
