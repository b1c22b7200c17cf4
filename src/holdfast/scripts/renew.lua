-- renew: keep the lock for at least ttl more, if it is still this token's.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 tombstones  5 delay  6 holds of the owner, if it has one
-- ARGV  1 token  2 ttl (ms)  3 settings  4 serial of the request
--
-- Returns  fence .. serial  kept
--          0 .. serial      it was not ours, and nothing was changed
--
-- Expiry only grows, so that a request that arrives late cannot shorten what a newer one asked for.
-- PEXPIRE needs no memory: this works on a server that is full.

local call = redis.call
local token, ttl, settings, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _settings
--:include _owner
--:include _new_fence

local holder = call('GET', KEYS[1])
if not holder or not has_hold(holder, token) then
  return '0' .. serial
end
if order == 'forever' then
  call('SET', KEYS[1], token)
else
  local left = keep_hold(holder, token, ttl)
  if delay > 0 then
    redis.pcall('SET', KEYS[5], holder, 'PX', left + delay)
  end
end
call('PEXPIRE', KEYS[2], math.max(3600000, 2 * ttl))
return (call('GET', KEYS[2]) or new_fence()) .. serial
