-- downgrade: replace a writer's token by a reader's, without a gap. Times in ms.
--
-- KEYS  1 holders of an rwlock (see _holders)
--       2 fence counter
--       3 queue
-- ARGV  1 token of the reader
--       2 ttl
--       3 token of the writer
--       4 settings (see _settings)
--       5 serial of the request: three digits
--
-- Returns  1 .. serial  the reader has the lease, by this request or by an earlier one
--          0 .. serial  the writer's lease has ended, or that of the reader
--          error QUARANTINE <ms>, as renew
--
-- It is the same lease, which keeps its fence. The lease is extended, so that the client sends this
-- request instead of a renewal as long as it has no reply. Readers that are next in the queue are
-- granted the lock. The writer's token is void afterwards.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, writer, settings, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

local quiet = true  -- the reply is a number
--:include _settings
--:include _quarantine
--:include _fence
--:include _holders
--:include _released
--:include _hand_out
--:include _tombstone

keep_counter()
local tombstone = call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
local expiry, after_loss = expiry_of(writer)
local own_expiry, own_after_loss = expiry_of(token)
if tombstone or not (expiry or own_expiry) then
  return '0' .. serial
end
local quarantined = quarantine()
local longest = quarantined and tonumber(call('GET', 'holdfast:quarantine'))
if quarantined and quarantined > longest then
  return redis.error_reply('QUARANTINE ' .. quarantined - longest)
end
if expiry then
  hold(token, math.max(ttl, expiry - now), after_loss)
  call('ZREM', lock, writer)
  add_tombstone(writer, 60000)
else
  hold(token, ttl, own_after_loss)
end
local used, _, left = usage()
hand_out(used, left, true)
if publish_error then
  return publish_error
end
return '1' .. serial
