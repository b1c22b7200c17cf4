-- renew: keep the lock for at least ttl more, if it is still this token's.
--
-- KEYS  1 lock  2 fence counter; and if it has an owner  3 queue  4 holds of the owner
-- ARGV  1 token  2 ttl (ms)  3 settings  4 the fence of the lease, 0 if it is not known yet
--       5 serial of the request
--
-- Returns  fence .. serial  kept
--          0 .. serial      it is another's, or was taken from us; nothing was changed
--          {serial}         there is no such key, and no script took it from us: the server lost its
--                           data, or the key was deleted or evicted
--          or the error QUARANTINE <left, ms>: it is ours, and may not be kept until then
--
-- Expiry only grows, so that a request that arrives late cannot shorten what a newer one asked for.
-- PEXPIRE needs no memory: this works on a server that is full. The queue is not named, because it may
-- not exist: while a slot moves, a cluster serves only those of whose keys all are on one node.
--
-- While the server whose place this one took may still take writes, keeping a lock here would keep
-- nobody from getting it there, once it has run out there. That is so at the beginning of a
-- quarantine, until as much of it is left as the longest lease has.

local call = redis.call
local lock = KEYS[1]
local token, ttl, settings, fence, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _settings
--:include _quarantine
--:include _owner
--:include _fence

local holder, left = call('GET', lock), call('PTTL', lock)
if is_over(left) or not has_hold(holder, token) then
  -- Each grant to another, and each eviction by an operator, raises the counter.
  if not holder and tonumber(call('GET', KEYS[2]) or 0) <= tonumber(fence) then
    return {serial}
  end
  return '0' .. serial
end
local quarantined = quarantine()
local longest = quarantined and tonumber(call('GET', 'holdfast:quarantine'))
if quarantined and quarantined > longest then
  return redis.error_reply('QUARANTINE ' .. quarantined - longest)
end
if order == 'forever' then
  call('SET', lock, token)
else
  keep_hold(holder, token, left, ttl)
end
call('PEXPIRE', KEYS[2], math.max(3600000, 2 * ttl))
return (call('GET', KEYS[2]) or new_fence()) .. serial
