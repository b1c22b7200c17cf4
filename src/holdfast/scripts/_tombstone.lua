-- A part of scripts that end a token. Needs: call.
--
-- A tombstone is for a token one of whose requests was abandoned and may still arrive: it must find
-- that it comes too late.

local function bury(token, life)
  local time = call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local crumbled = call('ZRANGE', KEYS[4], '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)
  if #crumbled > 0 then
    call('ZREM', KEYS[4], unpack(crumbled))
  end
  redis.pcall('ZADD', KEYS[4], now + life, token)
  redis.pcall('PEXPIRE', KEYS[4], life)
end
