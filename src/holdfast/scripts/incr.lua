-- incr: add to a counter, whose expiry begins with its first use.
--
-- KEYS  1 counter  2 record of the id, if there is one
-- ARGV  1 what to add  2 expiry (ms), 0 for none  3 and 4 with an id, see _once  and last
--       serial of the request
--
-- Returns  {1, what it is now, serial}
--          {'wrong', why, serial}  it is no integer of 64 bits, or would not be one; nothing was changed
--          {'other', serial}       the id is that of another operation on this key
--
-- A counter that is found without an expiry gets one: somebody made it in two steps, and was
-- interrupted between them.

local call = redis.call
local key, expiry, serial = KEYS[1], tonumber(ARGV[2]), ARGV[#ARGV]
if not expiry or expiry < 0 then
  return redis.error_reply('ERR holdfast: an expiry must be at least 1 ms')
end

--:include _once

local value = redis.pcall('INCRBY', key, ARGV[1])
if type(value) == 'table' then
  return refuse(value)
end
if expiry > 0 and call('PTTL', key) < 0 then
  call('PEXPIRE', key, expiry)
end
return answer(1, call('GET', key))
