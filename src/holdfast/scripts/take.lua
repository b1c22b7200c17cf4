-- take: take from a number, but not below a floor.
--
-- KEYS  1 number  2 record of the id, if there is one
-- ARGV  1 how much, at least 1  2 what must be there: the floor and how much  3 and 4 with an id, see
--       _once  and last  serial of the request
--
-- Returns  {1, left, serial}       taken
--          {0, left, serial}       not taken, and nothing was changed: there was too little
--          {'wrong', why, serial}  what is there is no integer of 64 bits; nothing was changed
--          {'other', serial}       the id is that of another operation on this key
--
-- A key that does not exist counts as 0.

local call = redis.call
local key, serial = KEYS[1], ARGV[#ARGV]

-- The commonest case first, for what it costs: no id, and numbers that Lua can hold.
if not KEYS[2] and #ARGV[1] < 16 and #ARGV[2] < 16 then
  local value = tonumber(redis.pcall('GET', key))
  if value and value < 2^53 and value >= tonumber(ARGV[2]) then
    local left = redis.pcall('DECRBY', key, ARGV[1])
    if type(left) == 'number' then
      return {1, left, serial}
    end
  end
end

--:include _once
--:include _integer

local value = integer_at(key)
if type(value) == 'table' then
  return refuse(value)
end
if not at_least(value, ARGV[2]) then
  return answer(0, value)
end
local left = redis.pcall('DECRBY', key, ARGV[1])
if type(left) == 'table' then
  return refuse(left)
end
return answer(1, call('GET', key))
