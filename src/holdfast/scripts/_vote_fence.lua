-- Included by vote: sets `fence` (µs). Needs: call, ttl (ms), and `fence` as a local variable.
--
-- Writes the fence of this vote: the client's hint, limited to 1 s around this node's clock, or a
-- number above the last fence if that is greater. It is text to include, not a function: vote includes
-- it once directly, where it has to be fast, and once in a function.
--
-- A hint that ends with 1 is a time: then the last digit of the fence is computed here (see _fence).
-- Any other is the fence of a lease that is restored on this node, whose last digit is kept.

local time, counter_ms = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'
fence = ARGV[3]
local ahead, digit = fence - time[1] * 1000000 - time[2], string.byte(fence, -1)
if ahead > 1000000 or ahead < -1000000 then
  fence = string.format('%.0f', fence - ahead + (ahead > 0 and 1000000 or -1000000))
end
fence = string.sub(fence, 1, -2) .. '0'
local last = call('SET', KEYS[2], fence, 'PX', counter_ms, 'GET')
local after_loss = digit == 50
if digit == 49 then
  after_loss = last and string.byte(last, -1) % 2 == 0
end
if after_loss or (last and (#last > #fence or last >= fence)) then  -- as text, see _next_fence
  --:include _raise_fence
end
