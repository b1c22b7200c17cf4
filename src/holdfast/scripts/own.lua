-- own: a script of the user's that is carried out once for its id. Its text stands where it says so.
--
-- KEYS  the script's own, and last the record of the id
-- ARGV  the script's own, and then  digest of what is asked for  life of the record (ms)  serial of the
--       request
--
-- Returns  {1, what it answered, serial}
--          {0, its error, serial}  it failed; what it wrote before that stays
--          {'other', serial}       the id is that of another script, or of other arguments
--
-- How it failed is an answer too, and told again: it may have written something by then.

local serial, life, digest = table.remove(ARGV), table.remove(ARGV), table.remove(ARGV)
local record = table.remove(KEYS)
local kept = redis.call('GET', record)
if kept and #kept > 40 then
  if string.sub(kept, 1, 40) ~= digest then
    return {'other', serial}
  end
  return {tonumber(string.sub(kept, 42, 42)), cmsgpack.unpack(string.sub(kept, 44)), serial}
end
redis.call('SET', record, digest, 'PX', life)

local function own()
--:own text
end

local done, answer = pcall(own)
if type(answer) == 'table' and answer.err then
  done, answer = false, answer.err
end
if answer == nil then
  answer = false
end
done = done and 1 or 0
redis.call('SET', record, digest .. ' ' .. done .. ' ' .. cmsgpack.pack(answer), 'PX', life)
return {done, answer, serial}
