local function user_script(...) --:user script
end

-- user_script: run a script of the user once per id. Times are in ms.
--
-- The user's text replaces the marker on the first line: so errors name the user's line numbers,
-- and the text does not see the local names below.
--
-- KEYS  the keys of the user's script
--       last: record of the id
-- ARGV  the arguments of the user's script
--       then: digest of the operation, life of the record
--
-- Returns  {1, what the script returned}
--          {0, its error}  the script failed; what it wrote before that stays
--          {'other'}       the id belongs to another script, or to other arguments
--
-- A failure is recorded like a result, because the script may have written something before it
-- failed. Replies carry no serial, because a syntax error in the user's text could not: the wire
-- frames them with an echo.

local record_ms, digest = table.remove(ARGV), table.remove(ARGV)
local record = table.remove(KEYS)
local recorded = redis.call('GET', record)
if recorded and #recorded > 40 then
  if string.sub(recorded, 1, 40) ~= digest then
    return {'other'}
  end
  return {tonumber(string.sub(recorded, 42, 42)), cmsgpack.unpack(string.sub(recorded, 44))}
end
local begun = redis.pcall('SET', record, digest, 'PX', record_ms)
if begun.err then
  return begun  -- an error of the server, not of the script
end

local done, result = pcall(user_script)
if type(result) == 'table' and result.err then
  done, result = false, result.err
end
if not done then
  result = type(result) == 'table' and 'unknown error' or tostring(result)
elseif result == nil or type(result) == 'function' then
  result = false  -- the server returns nil for these
end
done = done and 1 or 0
redis.call('SET', record, digest .. ' ' .. done .. ' ' .. cmsgpack.pack(result), 'PX', record_ms)
return {done, result}
