-- evict_shared: take the permits from a given holder, and grant them to waiters. Times in ms.
--
-- KEYS  1 holders (see _holders)
--       2 fence counter
--       3 queue
-- ARGV  1 token of the holder
--       2 ttl
--       3 settings (see _settings)
--       4 serial of the request: three digits
--
-- Returns  1 .. serial  the holder had permits, and has none any more
--          0 .. serial  it had none; nothing was changed
--
-- The holder is not notified, and the fence counter is raised, as by evict.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, settings, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local quiet = true  -- the reply goes to the operator
--:include _settings
--:include _quarantine
--:include _fence
--:include _holders
--:include _released
--:include _hand_out
--:include _tombstone

keep_counter()  -- a server without memory refuses ZADD only to a script that has not written yet
local expiry = expiry_of(token)
if not expiry then
  return '0' .. serial
end
end_unreleased(token)
call('ZREM', queue, token, '!' .. token)
new_fence()
local used, _, left = usage()
hand_out(used, math.min(left or math.huge, expiry - now))
add_tombstone(token, 60000)
if publish_error then
  return publish_error
end
return '1' .. serial
