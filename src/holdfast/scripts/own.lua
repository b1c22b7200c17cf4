local function own(...) --:own text
end

-- own: a script of the user's that is carried out once for its id. Its text stands where it says so: on
-- the first line, so that errors name the user's own lines, and before all names that are ours.
--
-- KEYS  the script's own, and last the record of the id
-- ARGV  the script's own, and then  digest of what is asked for  life of the record (ms)
--
-- Returns  {1, what it answered}
--          {0, its error}  it failed; what it wrote before that stays
--          {'other'}       the id is that of another script, or of other arguments
--
-- How it failed is an answer too, and told again: it may have written something by then. Answers carry
-- no serial, because an error in the text itself could not: the wire seals them.

local life, digest = table.remove(ARGV), table.remove(ARGV)
local record = table.remove(KEYS)
local kept = redis.call('GET', record)
if kept and #kept > 40 then
  if string.sub(kept, 1, 40) ~= digest then
    return {'other'}
  end
  return {tonumber(string.sub(kept, 42, 42)), cmsgpack.unpack(string.sub(kept, 44))}
end
local begun = redis.pcall('SET', record, digest, 'PX', life)
if begun.err then
  return begun  -- as the server's error, not the script's
end

local done, answer = pcall(own)
if type(answer) == 'table' and answer.err then
  done, answer = false, answer.err
end
if not done then
  answer = type(answer) == 'table' and 'unknown error' or tostring(answer)
elseif answer == nil or type(answer) == 'function' then
  answer = false  -- as the server answers these
end
done = done and 1 or 0
redis.call('SET', record, digest .. ' ' .. done .. ' ' .. cmsgpack.pack(answer), 'PX', life)
return {done, answer}
