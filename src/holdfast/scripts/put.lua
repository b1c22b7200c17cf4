-- put: add to a number, but not above a ceiling.
--
-- KEYS  1 number  2 record of the id, if there is one
-- ARGV  1 how much, at least 1  2 what may be there at most: the ceiling less how much  3 and 4 with an
--       id, see _once  and last  serial of the request
--
-- Returns  as take: 1 if it was put, 0 if there was too much; and what is there then

local call = redis.call
local key, serial = KEYS[1], ARGV[#ARGV]

--:include _once
--:include _integer

local value = integer_at(key)
if type(value) == 'table' then
  return refuse(value)
end
if not at_least(ARGV[2], value) then
  return answer(0, value)
end
local left = redis.pcall('INCRBY', key, ARGV[1])
if type(left) == 'table' then
  return refuse(left)
end
return answer(1, call('GET', key))
