-- read: read a key and the record of an id of its updates, without any change.
--
-- KEYS  1 key
--       2 record of the id, if there is one
-- ARGV  1 serial of the request: three digits
--
-- Returns  {1, value or false, record or false, serial}
--          {'wrong', why, serial}  the key is not a string

local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then
  if string.find(value.err, 'WRONGTYPE') then
    return {'wrong', value.err, ARGV[1]}
  end
  return value
end
return {1, value, KEYS[2] and redis.call('GET', KEYS[2]) or false, ARGV[1]}
