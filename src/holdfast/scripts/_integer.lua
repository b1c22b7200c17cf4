-- Exact integers of 64 bits. A Lua number is exact only up to 2^53, so the integers stay text here,
-- and the server does the arithmetic.

-- Whether one >= other; both are written as the server writes integers.
local function at_least(one, other)
  if #one < 16 and #other < 16 then
    return tonumber(one) >= tonumber(other)
  end
  local negative = string.byte(one) == 45
  if negative ~= (string.byte(other) == 45) then
    return not negative
  end
  if #one ~= #other then
    return (#one > #other) ~= negative
  end
  if negative then
    return one <= other
  end
  return one >= other
end

local function is_integer(text)
  if text ~= '0' and not string.find(text, '^%-?[1-9]%d*$') then
    return false
  end
  return #text < 19 or (at_least(text, '-9223372036854775808') and at_least('9223372036854775807', text))
end

-- The integer at a key, as text; '0' if the key does not exist; an error reply if it is no integer.
local function integer_at(key)
  local value = redis.pcall('GET', key) or '0'
  if type(value) == 'string' and not is_integer(value) then
    return {err = 'ERR value is not an integer or out of range'}
  end
  return value
end
