-- renew: extend the token's lease to at least ttl from now. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue, and 4 holds of the owner, only if there is an owner
-- ARGV  1 token
--       2 ttl
--       3 settings (see _settings)
--       4 fence of the lease, 0 if it is not known yet
--       5 serial of the request: three digits
--
-- Returns  fence .. serial  extended
--          0 .. serial      another token holds the lock, or it was taken from this one; nothing
--                           was changed
--          {serial}         the lock's key does not exist, and no script removed it: the server lost
--                           its data, or the key was deleted or evicted
--          error QUARANTINE <ms>  the token holds the lock, which cannot be extended for that time
--
-- The expiry only grows: a delayed request does not shorten what a newer one has requested. PEXPIRE
-- needs no memory, so this works on a server whose memory is full. The queue is not among the keys,
-- because it may not exist: while a slot is migrated, a cluster serves only requests whose keys are
-- all on one node.
--
-- Invariant: a lock that is extended here is not granted elsewhere.
-- This server: it was promoted, and extends the lease.
-- Replaced primary: it still accepts writes, does not receive the extension, and grants the lock
-- when the lease expires there.
-- So renewals fail at the beginning of a quarantine, until only the longest ttl is left of it.

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
  -- Each grant to another token, and each eviction, raises the counter.
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
keep_counter()
return (call('GET', KEYS[2]) or new_fence()) .. serial
