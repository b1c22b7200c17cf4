-- evict: take the lock from a given holder, and grant it to the first waiter. Times in ms.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 holds of the owner, if there is one
-- ARGV  1 SHA1 of the holder's token (the token of another lock library may be any bytes)
--       2 ttl
--       3 settings, as derived from the holder's token (see _settings)
--       4 serial of the request: three digits
--
-- Returns  1 .. serial  that holder had the lock, and does not have it any more
--          0 .. serial  another holder or none has the lock; nothing was changed
--
-- The holder is not notified: it detects the eviction when it renews or releases. The fence counter
-- is always raised. From this the holder detects that the lock was taken from it, and not lost by
-- the server (see renew). All holds of an owner end. If the lock has a lock delay, it begins now;
-- if it had begun already, it ends. A tombstone prevents delayed requests of the token from taking
-- the lock again.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local ttl, settings, serial = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local token = call('GET', lock)
if not token or redis.sha1hex(token) ~= ARGV[1] then
  return '0' .. serial
end

-- The reply goes to the operator: a grant to a waiter of the holder's client must be published.
local quiet = true
--:include _settings
--:include _quarantine
--:include _fence
--:include _released
--:include _hand_over
--:include _tombstone

local left = call('PTTL', lock)
call('ZREM', queue, token, '!' .. token)
if KEYS[4] then
  call('DEL', KEYS[4])
end
new_fence()
if delay > 0 and not is_over(left) then
  call('PEXPIRE', lock, delay)
  notify_two('W', delay)
elseif not hand_over() then
  call('DEL', lock)
end
if string.sub(token, 1, 4) == 'hf1:' then  -- another token was given by a user, who may use it again
  add_tombstone(token, 60000)
end
if publish_error then
  return publish_error
end
return '1' .. serial
