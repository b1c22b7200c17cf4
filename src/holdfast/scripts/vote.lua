-- vote: grant a quorum lock on this node if it is free here. Times in ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
-- ARGV  1 token
--       2 ttl
--       3 hint: the fence that the client proposes to all nodes
--       4 settings (see _settings)
--       5 waiter: the queue member to notify when the lock becomes free here, or ''
--       6 serial of the request: three digits
--
-- Returns  fence .. serial  granted here, by this request or by an earlier one with the same token
--          0 .. serial      the token was ended before this request arrived
--          {holder's token, left, serial}  another token holds it; left is -1 if it never expires
--
-- The fence is above this node's last one, and is the hint if that is near this node's clock (see
-- _vote_fence). So nodes whose clocks differ by less than a second, and whose last fence is the
-- same, choose the same fence.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, settings, waiter, serial = ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[5], ARGV[6]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

-- The fence is written before the lock: a script that fails in between leaves no lock held.
if settings == '0 barge ' and call('EXISTS', lock, queue) == 0 then
  local fence
  --:include _vote_fence
  call('SET', lock, token, 'PX', ARGV[2])
  return fence .. serial
end

local function new_vote_fence()
  local fence
  --:include _vote_fence
  return fence .. serial
end

--:include _settings

local function has_tombstone(token)
  return call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
end

if has_tombstone(token) then
  return '0' .. serial
end
local holder, left = call('GET', lock), call('PTTL', lock)
if not holder then
  if waiter ~= '' then
    call('ZREM', queue, waiter)
  end
  local reply = new_vote_fence()
  call('SET', lock, token, 'PX', ttl + delay)
  return reply
end
if holder == token and not is_over(left) then
  call('PEXPIRE', lock, math.max(left, ttl + delay))
  local fence = call('GET', KEYS[2])
  return fence and fence .. serial or new_vote_fence()
end
if waiter ~= '' and not has_tombstone(waiter) then
  local time = call('TIME')
  call('ZADD', queue, 'NX', string.format('%.0f', time[1] * 1000000 + time[2]), waiter)
  call('PEXPIRE', queue, 3600000)
end
return {holder, left, serial}
