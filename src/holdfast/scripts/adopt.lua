-- adopt: take over an exported lease under the caller's token. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
-- ARGV  1 token of the caller
--       2 ttl
--       3 exported token
--       4 settings (see _settings)
--       5 serial of the request: three digits
--
-- Returns  fence .. serial  the caller holds the lock, by this request or by an earlier one
--          0 .. serial      the lease has ended, or another client has adopted it
--          error QUARANTINE <ms>, as acquire
--
-- The exported token is void afterwards: if two clients adopt a lease, only one of them gets it.

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
local has_tombstone = call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
if (holder ~= exported and holder ~= token) or is_over(left) or has_tombstone then
  return '0' .. serial
end
add_tombstone(exported, 60000)
if order == 'forever' then
  call('SET', lock, token)
else
  call('SET', lock, token, 'PX', math.max(left, ttl + delay))
end
keep_counter()
return (call('GET', KEYS[2]) or new_fence()) .. serial
