-- renew_shared: extend the token's lease to at least ttl from now. Times in ms, fences in µs.
--
-- KEYS  1 holders (see _holders)
--       2 fence counter
-- ARGV  as renew
--
-- Returns  fence .. serial  extended. A lease whose fence is not known yet (0) gets a new one, because
--                           fences of holders are not stored (see acquire_shared)
--          0 .. serial      the token has no permits, or has none any more
--          {serial}         the key of the holders does not exist, and no script has granted permits
--                           since: the server lost its data, or the key was deleted or evicted
--          error QUARANTINE <ms>  the token has permits, whose lease cannot be extended for that time
--                           (see renew)
--
-- The expiry only grows. The life of the counter is extended first: a server without memory refuses
-- ZADD only to a script that has not written yet.

local call = redis.call
local lock = KEYS[1]
local token, ttl, settings, fence, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _settings
--:include _quarantine
--:include _fence
--:include _holders

keep_counter()
local expiry, after_loss = expiry_of(token)
if not expiry then
  local exists = call('EXISTS', lock) == 1
  if not exists and tonumber(call('GET', KEYS[2]) or 0) <= tonumber(fence) then
    return {serial}
  end
  return '0' .. serial
end
local quarantined = quarantine()
local longest = quarantined and tonumber(call('GET', 'holdfast:quarantine'))
if quarantined and quarantined > longest then
  return redis.error_reply('QUARANTINE ' .. quarantined - longest)
end
hold(token, ttl, after_loss)
return (fence == '0' and new_fence(after_loss) or fence) .. serial
