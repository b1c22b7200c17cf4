-- confirm: raise this node's fence of a quorum lock to the agreed one. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
-- ARGV  1 token
--       2 ttl
--       3 fence that the client wants a majority of nodes to have
--       4 settings (see _settings)
--       5 serial of the request: three digits
--
-- Returns  fence .. serial  the node's fence: the given one, or a higher one that it had already
--          0 .. serial      the token does not hold the lock here; nothing was changed

local call = redis.call
local lock = KEYS[1]
local token, ttl, fence, settings, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _settings

local left = call('PTTL', lock)
if call('GET', lock) ~= token or is_over(left) then
  return '0' .. serial
end
call('PEXPIRE', lock, math.max(left, ttl + delay))
local last = call('GET', KEYS[2])
if last and tonumber(last) >= tonumber(fence) then
  return last .. serial
end
local time = call('TIME')
local ahead_ms = math.max(0, (fence - time[1] * 1000000 - time[2]) / 1000)  -- as in _fence
call('SET', KEYS[2], fence, 'PX', string.format('%.0f', math.max(3600000, 2 * ttl) + ahead_ms))
return fence .. serial
