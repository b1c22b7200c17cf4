-- claim: take the lock under which a value is computed, unless a newer one is there already.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 value (see store)
-- ARGV  1 token  2 ttl (ms)  3 place  4 settings  5 seen: the fence of the value that the caller does
--       not want any more, 0 if it knows of none  6 serial of the request
--
-- Returns  {value, left (ms), serial}  it is there, and the caller neither has the lock nor waits for it
--          or what acquire does
--
-- Looked at and stood in line in one go, while store tells everybody in line and takes them out: so
-- nobody waits for a value that has just come, and who finds one is in no line.

local value = redis.call('GET', KEYS[4])
local fence = value and string.match(value, '^(%d+) %d+ %d+\n')
if fence and tonumber(fence) > tonumber(ARGV[5]) then
  return {value, redis.call('PTTL', KEYS[4]), ARGV[6]}
end

--:include acquire
