-- extend_redis_lock: add to the time that a lock of redis-py has left, or replace it. Times in ms.
--
-- The redis-py client sends this script in place of redis-py's own, so there is no serial. redis-py's
-- script returns 1 instead of the time left, and deletes a lock that it leaves no time.
--
-- KEYS  1 lock
-- ARGV  1 token
--       2 time to add
--       3 '1' to replace what is left
--
-- Returns  the time left now
--          0   the key has another token, does not exist, or never expires
--          -1  no time would be left; nothing is changed

local token = redis.call('get', KEYS[1])
local left = redis.call('pttl', KEYS[1])
if not token or token ~= ARGV[1] or left < 0 then
  return 0
end
if ARGV[3] == '1' then
  left = 0
end
left = left + ARGV[2]
if left < 1 then
  return -1
end
redis.call('pexpire', KEYS[1], left)
return left
