-- compare_and_delete: delete a key if it has the expected value. Times in ms.
--
-- KEYS  1 key
--       2 record of the id, if there is one
-- ARGV  1 expected value
--       2 and 3 with an id, see _once
--       last: serial of the request: three digits
--
-- Returns  {1, '', serial}         deleted
--          {0, '', serial}         not deleted: the key has another value, or does not exist
--          {'wrong', why, serial}  the key is not a string
--          {'other', serial}       the id belongs to another operation on this key

local call = redis.call
local key, serial = KEYS[1], ARGV[#ARGV]

--:include _once

local value = redis.pcall('GET', key)
if type(value) == 'table' then
  return fail(value)
end
if value ~= ARGV[1] then
  return reply(0, '')
end
call('DEL', key)
return reply(1, '')
