-- A part of scripts that grant: makes `fence`. Needs: call, ttl, and `fence` as a local name.
--
-- Writes the lock's next fence: above the last one, and floored by the server's clock in µs, so that
-- fences keep growing when the counter is lost. It is written before the lock is: what fails on the
-- way leaves nothing held. It stands as it is where it has to be quick, and in new_fence elsewhere.

local time, life = call('TIME'), math.max(3600000, 2 * ttl)
fence = time[1] .. string.sub('00000' .. time[2], -6)
local last = call('SET', KEYS[2], fence, 'PX', life, 'GET')
if last and tonumber(last) >= tonumber(fence) then
  fence = string.format('%.0f', tonumber(last) + 1)
  call('SET', KEYS[2], fence, 'PX', life)
end
