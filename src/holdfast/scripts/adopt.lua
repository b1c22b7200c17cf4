-- adopt: carry on, under a token of one's own, what another process exported.
--
-- KEYS  1 lock  2 fence counter  3 queue
-- ARGV  1 own token  2 ttl (ms)  3 exported token  4 settings  5 serial of the request
--
-- Returns  fence .. serial  the lock is the caller's, now or since an earlier sending
--          0 .. serial      it was no longer the exporter's, or was adopted by somebody else
--          or the error QUARANTINE, as acquire
--
-- The exported token is worth nothing afterwards: of two who adopt, one gets the lock.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, exported, settings, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _settings
--:include _quarantine
local quarantined = quarantine()
if quarantined then
  return redis.error_reply('QUARANTINE ' .. quarantined)
end

--:include _fence
--:include _tombstone

local holder, left = call('GET', lock), call('PTTL', lock)
local buried = call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
if (holder ~= exported and holder ~= token) or is_over(left) or buried then
  return '0' .. serial
end
bury(exported, 60000)
if order == 'forever' then
  call('SET', lock, token)
else
  call('SET', lock, token, 'PX', math.max(left, ttl + delay))
end
call('PEXPIRE', KEYS[2], math.max(3600000, 2 * ttl))
return (call('GET', KEYS[2]) or new_fence()) .. serial
