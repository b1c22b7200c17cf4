-- Included where a lock is granted: sets `fence` (µs). Needs: call, ttl (ms), and the local variables
-- `fence` and `after_loss`. It is text to include, not a function: acquire includes it once directly,
-- where it has to be fast, and once in a function (see _fence).
--
-- Writes the lock's next fence: the server's time, or a number above the last fence if that is greater.
-- So fences keep growing even after the counter is lost.
--
-- The last digit of a fence is 2 if the previous lease ended without a release, otherwise 0. A release
-- adds 1 to the counter (see _released). So the counter ends with an odd digit if the previous lease
-- was released, and with an even one if not. `after_loss` is not nil if the caller knows it better.

-- Numbers stay text where possible: converting one takes longer than the SET.
local time, counter_ms = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'
fence = time[1] .. string.sub('00000' .. time[2], -6, -2) .. '0'
local last = call('SET', KEYS[2], fence, 'PX', counter_ms, 'GET')
if after_loss == nil then
  after_loss = last and string.byte(last, -1) % 2 == 0
end
-- Without leading zeros, a number with fewer digits is lower, and numbers with as many digits compare
-- as text. So `last` is lower where this is false. Where it is true, _raise_fence compares the numbers.
if after_loss or (last and (#last > #fence or last >= fence)) then
  --:include _raise_fence
end
