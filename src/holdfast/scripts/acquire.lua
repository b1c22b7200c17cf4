-- acquire: take the lock if it is free, and number the taking, in one step.
--
-- KEYS  1 lock  2 fence counter  3 tombstone of this token
-- ARGV  1 token  2 ttl (ms)  3 life of the fence counter (ms)  4 serial of the request
--
-- Returns  fence .. serial      the lock is the caller's, now or since an earlier sending
--          0 .. serial          the token was given up before this request arrived
--          {holder's token, left (ms), serial}  somebody else's; left is -1 if it never expires
--
-- The fence is written before the lock: whatever fails on the way leaves nothing held.
-- TIME in µs floors the counter, so that fences keep growing when the counter is lost.

local call = redis.call
local token, ttl = ARGV[1], tonumber(ARGV[2])
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

if call('EXISTS', KEYS[1], KEYS[3]) > 0 then
  if call('EXISTS', KEYS[3]) == 1 then
    return '0' .. ARGV[4]
  end
  local holder, left = call('GET', KEYS[1]), call('PTTL', KEYS[1])
  if holder ~= token then
    return {holder, left, ARGV[4]}
  end
  -- A retry. Its expiry is written even when unchanged, and never shortened.
  ttl = math.max(left, ttl)
  call('PEXPIRE', KEYS[1], ttl)
  local fence = call('GET', KEYS[2])
  if fence then
    return fence .. ARGV[4]
  end
end

local time = call('TIME')
local fence = time[1] .. string.sub('00000' .. time[2], -6)
local last = call('SET', KEYS[2], fence, 'PX', ARGV[3], 'GET')
if last and tonumber(last) >= tonumber(fence) then
  fence = string.format('%.0f', tonumber(last) + 1)
  call('SET', KEYS[2], fence, 'PX', ARGV[3])
end
call('SET', KEYS[1], token, 'PX', ttl)
return fence .. ARGV[4]
