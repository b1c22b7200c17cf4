-- observe: return the leader of an election, or join the queue of its observers. Times in ms, fences and
-- tickets in µs.
--
-- KEYS  1 observers: a queue as that of a lock (see _notify and _tombstone)
--       2 lock of the election
--       3 fence counter
-- ARGV  1 token of the observer
--       2 ttl, not used
--       3 place, as acquire
--       4 settings, not used
--       5 what the observer knows: the token of the leader, '-' for none, '' for nothing
--       6 serial of the request: three digits
--
-- Returns  {leader's token or '', left, fence or '', serial}  the leader has changed; the observer has
--          no place in the queue
--          0 .. serial  the token was ended before this request arrived
--          {leader's token, left, ticket, 0, '', serial}  it has not changed; left is -1 without a
--          leader, and the token is then that of the observer: no client polls for that
--
-- Invariant: no observer waits in the queue for a change that has already happened (see campaign).

local call = redis.call
local queue, lock = KEYS[1], KEYS[2]
local token, place, seen, serial = ARGV[1], ARGV[3], ARGV[5], ARGV[6]

local function score(member)
  return call('ZADD', queue, 'XX', 'INCR', 0, member)
end

-- Skip tombstones to find the last ticket. Without any, a server without memory serves this request.
local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])
if last and last >= 1e16 then
  if score('+' .. token) then
    return '0' .. serial
  end
  local newest = call('ZRANGE', queue, '(1e16', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
  last = tonumber(newest[2])
end
local leader = call('GET', lock)
local left = leader and call('PTTL', lock) or -1
if seen ~= (leader or '-') then
  call('ZREM', queue, token, '!' .. token)
  return {leader or '', left, call('GET', KEYS[3]) or '', serial}
end
local ticket = '0'
if place ~= '' then
--:include _join_queue
  ticket = join_queue()
end
return {leader or token, left, ticket, 0, '', serial}
