-- A part of scripts that end a token. Needs: call, queue.
--
-- A tombstone is for a token one of whose requests was abandoned and may still arrive: it must find
-- that it comes too late. It is a '+' and the token, in the queue, behind everybody: at 1e16 and the
-- moment (ms) it may crumble. So one look at the last in the queue tells whether there are any.

local function bury(token, life)
  local time = call('TIME')
  local now = 1e16 + time[1] * 1000 + math.floor(time[2] / 1000)
  local crumbled = call('ZRANGE', queue, '1e16', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, 100)
  if #crumbled > 0 then
    call('ZREM', queue, unpack(crumbled))
  end
  redis.pcall('ZADD', queue, string.format('%.0f', now + life), '+' .. token)
  redis.pcall('PEXPIRE', queue, math.max(call('PTTL', queue), life))
end
