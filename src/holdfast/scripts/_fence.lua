-- A part of scripts that may have to grant. Needs: call, ttl.

-- Writes and returns the lock's next fence: above the last one, and floored by the server's clock in
-- µs, so that fences keep growing when the counter is lost. It is written before the lock is: what
-- fails on the way leaves nothing held.
local function new_fence()
  -- Numbers are given as text where there is one: turning one into the other takes longer than SET.
  local time, life = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'
  local fence = time[1] .. string.sub('00000' .. time[2], -6)
  local last = call('SET', KEYS[2], fence, 'PX', life, 'GET')
  if last and tonumber(last) >= tonumber(fence) then
    fence = string.format('%.0f', tonumber(last) + 1)
    call('SET', KEYS[2], fence, 'PX', life)
  end
  return fence
end
