-- A part of vote: makes `fence`. Needs: call, ttl, and `fence` as a local name.
--
-- Writes the number of what is given here: above the last one, and the hint if that is near this
-- node's clock. It stands as it is where it has to be quick, and in a function elsewhere.

local time, life = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'
fence = ARGV[3]
local ahead = fence - time[1] * 1000000 - time[2]
if ahead > 1000000 or ahead < -1000000 then
  fence = string.format('%.0f', fence - ahead + (ahead > 0 and 1000000 or -1000000))
end
local last = call('SET', KEYS[2], fence, 'PX', life, 'GET')
if last and tonumber(last) >= tonumber(fence) then
  fence = string.format('%.0f', tonumber(last) + 1)
  call('SET', KEYS[2], fence, 'PX', life)
end
