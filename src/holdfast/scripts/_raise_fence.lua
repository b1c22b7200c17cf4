-- Included where a fence was written: writes it again, above the last one. All times are in µs or ms.
-- Needs: call, last, fence, counter_ms, after_loss.
--
-- If the clock was set back, the counter is kept until the clock has passed it, and as long again as
-- usual. Otherwise the next fence would be the time, which is lower.

local number = fence + (after_loss and 2 or 0)
if last and number <= tonumber(last) then
  number = last - last % 10 + (after_loss and 12 or 10)
end
local behind_ms = (number - fence) / 1000
fence = string.format('%.0f', number)
call('SET', KEYS[2], fence, 'PX', string.format('%.0f', counter_ms + behind_ms))
