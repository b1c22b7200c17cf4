-- Included by vote: sets `fence` (µs). Needs: call, ttl (ms), and `fence` as a local variable.
--
-- Writes the fence of this vote: the client's hint, limited to 1 s around this node's clock, or the
-- last fence plus one if that is greater. It is text to include, not a function: vote includes it
-- once directly, where it has to be fast, and once in a function.

local time, counter_ms = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'
fence = ARGV[3]
local ahead = fence - time[1] * 1000000 - time[2]
if ahead > 1000000 or ahead < -1000000 then
  fence = string.format('%.0f', fence - ahead + (ahead > 0 and 1000000 or -1000000))
end
local last = call('SET', KEYS[2], fence, 'PX', counter_ms, 'GET')
if last and tonumber(last) >= tonumber(fence) then
  local behind_ms = (last - fence) / 1000  -- as in _fence
  fence = string.format('%.0f', tonumber(last) + 1)
  call('SET', KEYS[2], fence, 'PX', string.format('%.0f', counter_ms + behind_ms))
end
