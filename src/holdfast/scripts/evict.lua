-- evict: take the lock from its holder, if it still is the one that was seen, and hand it to whoever is
-- next in line. The holder is not asked: it learns of it when it renews, or releases.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 holds of the owner, if it has one
-- ARGV  1 SHA1 of the holder's token, which may be another client's and any bytes  2 ttl (ms)
--       3 settings, as the holder's token tells them  4 serial of the request
--
-- Returns  1 .. serial  it was theirs, and is not any more
--          0 .. serial  it was not theirs, and nothing was changed
--
-- The fence counter is raised in any case: from this the holder sees that the lock was taken from it,
-- and not lost by the server (see renew). All holds of an owner end. A lock delay begins, as for any
-- holder that was lost; where it has begun already, it ends. The token is buried: nothing of it that may still be under way takes the lock again.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local ttl, settings, serial = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local token = call('GET', lock)
if not token or redis.sha1hex(token) ~= ARGV[1] then
  return '0' .. serial
end

-- The answer is ours, and a grant to another of the holder's client is theirs.
local quiet = true
--:include _settings
--:include _quarantine
--:include _fence
--:include _hand_over
--:include _tombstone

local left = call('PTTL', lock)
call('ZREM', queue, token, '!' .. token)
if KEYS[4] then
  call('DEL', KEYS[4])
end
if delay > 0 and not is_over(left) then
  call('PEXPIRE', lock, delay)
  new_fence()
  tell_next('W', delay)
elseif not hand_over() then
  call('DEL', lock)
  new_fence()
end
bury(token, 60000)
if denied then
  return denied
end
return '1' .. serial
