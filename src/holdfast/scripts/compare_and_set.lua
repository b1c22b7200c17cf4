-- compare_and_set: write a value if another one is there.
--
-- KEYS  1 key  2 record of the id, if there is one
-- ARGV  1 '=' and what must be there, or nothing if the key must not exist  2 what to write  3 expiry
--       (ms), 0 for none, nothing to leave it as it is  4 'always', or 'written' if only a value that was
--       written is an answer for good, and is to be told again  5 and 6 with an id, see _once  and
--       last  serial of the request
--
-- Returns  {1, '', serial}         written; told again with 'written': the value that was
--          {0, '', serial}         not written: something else was there
--          {'wrong', why, serial}  what is there is no string
--          {'other', serial}       the id is that of another operation on this key

local call = redis.call
local key, expected, new, expiry, serial = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[#ARGV]

--:include _once

local is_there
if expected == '' then
  is_there = call('EXISTS', key) == 0
else
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then
    return refuse(value)
  end
  is_there = value == string.sub(expected, 2)
end
if not is_there then
  if record and ARGV[4] == 'written' then
    call('DEL', record)
    record = nil
  end
  return answer(0, '')
end
if expiry == '' then
  call('SET', key, new, 'KEEPTTL')
elseif expiry == '0' then
  call('SET', key, new)
else
  call('SET', key, new, 'PX', expiry)
end
return answer(1, ARGV[4] == 'written' and record and new or '')
