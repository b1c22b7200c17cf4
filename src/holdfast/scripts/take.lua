-- take: subtract from a number, down to a floor. Times in ms.
--
-- KEYS  1 number
--       2 record of the id, if there is one
-- ARGV  1 amount, at least 1
--       2 least value from which the amount may be taken: the floor plus the amount
--       3 and 4 with an id, see _once
--       last: serial of the request: three digits
--
-- Returns  {1, new value, serial}  taken
--          {0, value, serial}      not taken: the difference would be below the floor
--          {'wrong', why, serial}  the value is no 64-bit integer; nothing was changed
--          {'other', serial}       the id belongs to another operation on this key
--
-- A missing key counts as 0.

local call = redis.call
local key, serial = KEYS[1], ARGV[#ARGV]

-- Fast path: no id, and numbers that are exact in Lua.
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
  return fail(value)
end
if not at_least(value, ARGV[2]) then
  return reply(0, value)
end
local left = redis.pcall('DECRBY', key, ARGV[1])
if type(left) == 'table' then
  return fail(left)
end
return reply(1, call('GET', key))
