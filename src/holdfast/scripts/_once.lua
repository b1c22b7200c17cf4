-- What has an id is carried out once: whoever asks again is given the first answer. KEYS[2] is the
-- record of the id then, and the last arguments are  digest of what is asked for  life of the record
-- (ms)  serial. The record is written before anything else, still without an answer: a server that does
-- not let us keep it refuses here, and has changed nothing.

local record, digest, life = KEYS[2], ARGV[#ARGV - 2], ARGV[#ARGV - 1]
local kept = record and call('GET', record)
if kept and #kept > 40 then
  if string.sub(kept, 1, 40) ~= digest then
    return {'other', serial}
  end
  return {tonumber(string.sub(kept, 42, 42)), string.sub(kept, 44), serial}
end
if record then
  call('SET', record, digest, 'PX', life)
end

local function answer(done, left)
  if record then
    call('SET', record, digest .. ' ' .. done .. ' ' .. left, 'PX', life)
  end
  return {done, left, serial}
end

-- Nothing was changed: because of what the key holds, which the caller is told as such, or of the server.
local function refuse(refusal)
  if record then
    call('DEL', record)
  end
  local why = refusal.err
  for _, sign in ipairs({'WRONGTYPE', 'not an integer', 'overflow'}) do
    if string.find(why, sign) then
      return {'wrong', why, serial}
    end
  end
  return refusal
end
