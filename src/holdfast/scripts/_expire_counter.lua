-- Included by scripts that keep the counter for a minute only, because there may be many of them:
-- `expire_counter`. Needs: call. Times in ms, fences in µs.

-- Lets the counter, which has this fence, expire a minute after the clock has passed the fence. If it
-- expired earlier, after the clock was set back, the next fence would be lower.
local function expire_counter(fence)
  local time = call('TIME')
  local ahead_ms = math.max(0, (fence - time[1] * 1000000 - time[2]) / 1000)
  call('PEXPIRE', KEYS[2], string.format('%.0f', 60000 + ahead_ms))
end
