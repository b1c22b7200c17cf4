-- compare_and_delete: delete a key if it has this value.
--
-- KEYS  1 key  2 record of the id, if there is one
-- ARGV  1 value  2 and 3 with an id, see _once  and last  serial of the request
--
-- Returns  {1, '', serial}         deleted
--          {0, '', serial}         not deleted: something else is there, or nothing
--          {'wrong', why, serial}  what is there is no string
--          {'other', serial}       the id is that of another operation on this key

local call = redis.call
local key, serial = KEYS[1], ARGV[#ARGV]

--:include _once

local value = redis.pcall('GET', key)
if type(value) == 'table' then
  return refuse(value)
end
if value ~= ARGV[1] then
  return answer(0, '')
end
call('DEL', key)
return answer(1, '')
