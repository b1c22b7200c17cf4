-- vote: this node's part of a lock that several nodes keep: take it here if it is free here.
--
-- KEYS  1 lock  2 fence counter  3 queue
-- ARGV  1 token  2 ttl (ms)  3 hint: the fence (µs) that all nodes are asked to number it with
--       4 settings  5 waiter: who is to be told when it becomes free here, or ''
--       6 serial of the request
--
-- Returns  fence .. serial  it is the caller's here, now or since an earlier sending
--          0 .. serial      the token was given up before this request arrived
--          {holder's token, left (ms), serial}  somebody else's; left is -1 if it never expires
--
-- The number is above the last one, and the hint if that is near this node's clock: so nodes that
-- agree about the time within a second, and about the last number, number it alike.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, settings, waiter, serial = ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[5], ARGV[6]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

-- Numbered before it is taken: what fails on the way leaves nothing held.
if settings == '0 barge ' and call('EXISTS', lock, queue) == 0 then
  local fence
  --:include _number
  call('SET', lock, token, 'PX', ARGV[2])
  return fence .. serial
end

local function number()
  local fence
  --:include _number
  return fence .. serial
end

--:include _settings

local function is_buried(token)
  return call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
end

if is_buried(token) then
  return '0' .. serial
end
local holder, left = call('GET', lock), call('PTTL', lock)
if not holder then
  if waiter ~= '' then
    call('ZREM', queue, waiter)
  end
  local answer = number()
  call('SET', lock, token, 'PX', ttl + delay)
  return answer
end
if holder == token and not is_over(left) then
  call('PEXPIRE', lock, math.max(left, ttl + delay))
  local fence = call('GET', KEYS[2])
  return fence and fence .. serial or number()
end
if waiter ~= '' and not is_buried(waiter) then
  local time = call('TIME')
  call('ZADD', queue, 'NX', string.format('%.0f', time[1] * 1000000 + time[2]), waiter)
  call('PEXPIRE', queue, 3600000)
end
return {holder, left, serial}
