-- incr: add to a counter, which expires some time after its first use. Times in ms.
--
-- KEYS  1 counter
--       2 record of the id, if there is one
-- ARGV  1 amount
--       2 expiry, 0 for none
--       3 and 4 with an id, see _once
--       last: serial of the request: three digits
--
-- Returns  {1, new value, serial}
--          {'wrong', why, serial}  old or new value is no 64-bit integer; nothing was changed
--          {'other', serial}       the id belongs to another operation on this key
--
-- A counter without an expiry gets one: another program created it with INCR, and was interrupted
-- before its EXPIRE.

local call = redis.call
local key, expiry, serial = KEYS[1], tonumber(ARGV[2]), ARGV[#ARGV]
if not expiry or expiry < 0 then
  return redis.error_reply('ERR holdfast: an expiry must be at least 1 ms')
end

--:include _once

local value = redis.pcall('INCRBY', key, ARGV[1])
if type(value) == 'table' then
  return fail(value)
end
if expiry > 0 and call('PTTL', key) < 0 then
  call('PEXPIRE', key, expiry)
end
return reply(1, call('GET', key))
