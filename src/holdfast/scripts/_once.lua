-- Included by atomic operations: an operation with an id is carried out once, and a retry receives
-- the first reply. Needs: call, serial. With an id, KEYS[2] is the record of the id, and the last
-- arguments are: digest of the operation, life of the record (ms), serial.
--
-- The record is first written without a reply, before any change. A server that cannot store it
-- fails here, and has changed nothing.

local record, digest, record_ms = KEYS[2], ARGV[#ARGV - 2], ARGV[#ARGV - 1]
local recorded = record and call('GET', record)
if recorded and #recorded > 40 then
  if string.sub(recorded, 1, 40) ~= digest then
    return {'other', serial}
  end
  return {tonumber(string.sub(recorded, 42, 42)), string.sub(recorded, 44), serial}
end
if record then
  call('SET', record, digest, 'PX', record_ms)
end

local function reply(done, value)
  if record then
    call('SET', record, digest .. ' ' .. done .. ' ' .. value, 'PX', record_ms)
  end
  return {done, value, serial}
end

-- Removes the record, and returns the error: as 'wrong' if the cause is the value at the key, else
-- as the server's error. Nothing was changed.
local function fail(failure)
  if record then
    call('DEL', record)
  end
  local why = failure.err
  for _, sign in ipairs({'WRONGTYPE', 'not an integer', 'overflow'}) do
    if string.find(why, sign) then
      return {'wrong', why, serial}
    end
  end
  return failure
end
