-- put: add to a number, up to a ceiling. Times in ms.
--
-- KEYS  1 number
--       2 record of the id, if there is one
-- ARGV  1 amount, at least 1
--       2 greatest value to which the amount may be added: the ceiling minus the amount
--       3 and 4 with an id, see _once
--       last: serial of the request: three digits
--
-- Returns  {1, new value, serial}  added
--          {0, value, serial}      not added: the sum would be above the ceiling
--          {'wrong', why, serial}  the value is no 64-bit integer; nothing was changed
--          {'other', serial}       the id belongs to another operation on this key
--
-- A missing key counts as 0.

local call = redis.call
local key, serial = KEYS[1], ARGV[#ARGV]

--:include _once
--:include _integer

local value = integer_at(key)
if type(value) == 'table' then
  return fail(value)
end
if not at_least(ARGV[2], value) then
  return reply(0, value)
end
local left = redis.pcall('INCRBY', key, ARGV[1])
if type(left) == 'table' then
  return fail(left)
end
return reply(1, call('GET', key))
