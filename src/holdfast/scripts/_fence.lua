-- Included by scripts that may grant the lock: `new_fence` (µs). Needs: call, ttl (ms).

-- Writes the lock's next fence and returns it: the server's time in µs, or the last fence plus one
-- if that is greater. So fences keep growing even after the counter is lost. Callers write the
-- fence before the lock: a script that fails in between leaves no lock held.
local function new_fence()
  -- Numbers stay text where possible: converting one takes longer than the SET.
  local time, counter_ms = call('TIME'), ttl > 1800000 and 2 * ttl or '3600000'
  local fence = time[1] .. string.sub('00000' .. time[2], -6)
  local last = call('SET', KEYS[2], fence, 'PX', counter_ms, 'GET')
  if last and tonumber(last) >= tonumber(fence) then
    -- The clock was set back. The counter is kept until the clock has passed it, and as long again
    -- as usual. Otherwise the next fence would be the time, which is lower.
    local behind_ms = (last - fence) / 1000
    fence = string.format('%.0f', tonumber(last) + 1)
    call('SET', KEYS[2], fence, 'PX', string.format('%.0f', counter_ms + behind_ms))
  end
  return fence
end

-- Extends the life of the counter, with a renewal for example. It is never shortened.
local function keep_counter()
  call('PEXPIRE', KEYS[2], math.max(call('PTTL', KEYS[2]), 3600000, 2 * ttl))
end
