-- hset: write fields of a hash.
--
-- KEYS  1 key
-- ARGV  field, value, field, value, …
--
-- Returns  how many fields are new

-- One call for each field: Lua cannot pass thousands of arguments to one call.
local new = 0
for number = 1, #ARGV, 2 do
  new = new + redis.call('HSET', KEYS[1], ARGV[number], ARGV[number + 1])
end
return new
