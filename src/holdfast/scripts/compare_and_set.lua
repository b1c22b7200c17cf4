-- compare_and_set: write a key if it has the expected value. Times in ms.
--
-- KEYS  1 key
--       2 record of the id, if there is one
-- ARGV  1 '=' and the expected value, or '' if the key must not exist
--       2 new value
--       3 expiry; 0 for none, '' to keep the present one
--       4 'always' to record the reply of every outcome, or 'written' to record it only if the
--         value is written, with that value
--       5 and 6 with an id, see _once
--       last: serial of the request: three digits
--
-- Returns  {1, '', serial}         written; with 'written' and an id: {1, new value, serial}
--          {0, '', serial}         not written: the key has another value
--          {'wrong', why, serial}  the key is not a string
--          {'other', serial}       the id belongs to another operation on this key

local call = redis.call
local key, expected, new, expiry, serial = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[#ARGV]

--:include _once

local matches
if expected == '' then
  matches = call('EXISTS', key) == 0
else
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then
    return fail(value)
  end
  matches = value == string.sub(expected, 2)
end
if not matches then
  if record and ARGV[4] == 'written' then
    call('DEL', record)
    record = nil
  end
  return reply(0, '')
end
if expiry == '' then
  call('SET', key, new, 'KEEPTTL')
elseif expiry == '0' then
  call('SET', key, new)
else
  call('SET', key, new, 'PX', expiry)
end
return reply(1, ARGV[4] == 'written' and record and new or '')
