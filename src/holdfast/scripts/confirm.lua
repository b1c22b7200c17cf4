-- confirm: number what this token has of a lock that several nodes keep, as the others do.
--
-- KEYS  1 lock  2 fence counter  3 queue
-- ARGV  1 token  2 ttl (ms)  3 fence  4 settings  5 serial of the request
--
-- Returns  fence .. serial  the fence given, or a higher one that stands here
--          0 .. serial      it is not this token's here, and nothing was changed

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
call('SET', KEYS[2], fence, 'PX', math.max(3600000, 2 * ttl))
return fence .. serial
