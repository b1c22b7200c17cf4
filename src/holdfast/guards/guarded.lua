local function write(...) --:write
end

-- guarded: run a write if no key has a newer fence. Times in ms.
--
-- The text of the write replaces the marker on the first line: so errors name its line numbers, and
-- it does not see the local names below. It is set.lua, hset.lua, nothing, or a script of the user.
--
-- KEYS  the keys of the write
--       then as many keys with their fences, in the same order
-- ARGV  the arguments of the write
--       then: fence of the lease, time for which fences are kept or ''
--
-- Returns  {1, what the write returned}
--          {0, number of a key, its fence}  refused: this fence is newer; nothing was written
--
-- Fences are below 2^53, so that Lua compares them exactly. They are raised before the write: if
-- the write fails in between, older leases are refused although nothing was written, as intended.

local keep_ms, fence = table.remove(ARGV), table.remove(ARGV)
local fence_keys = {}
for number = #KEYS / 2, 1, -1 do
  fence_keys[number] = table.remove(KEYS)
end
for number, key in ipairs(fence_keys) do
  local newest = redis.call('GET', key)
  if newest and tonumber(newest) > tonumber(fence) then
    return {0, number, newest}
  end
end
for _, key in ipairs(fence_keys) do
  if keep_ms == '' then
    redis.call('SET', key, fence)
  else
    -- Another guard may keep it longer: -1 is without expiry, -2 means that there is none.
    local left = redis.call('PTTL', key)
    if left == -1 or left > tonumber(keep_ms) then
      redis.call('SET', key, fence, 'KEEPTTL')
    else
      redis.call('SET', key, fence, 'PX', keep_ms)
    end
  end
end
local result = write()
if type(result) == 'table' and result.err then
  return result
end
if result == nil then
  result = false  -- the server returns nil for it; a nil would shorten the reply
end
return {1, result}
