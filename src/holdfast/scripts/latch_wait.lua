-- latch_wait: return that a latch is open, or join the queue of those that wait. Times in ms, tickets
-- in µs.
--
-- KEYS  as latch_count
-- ARGV  1 to 4 as acquire
--       5 count of the latch
--       6 keep: life of the latch after its last use
--       7 serial of the request: three digits
--
-- Returns  {'open', serial}         the caller has no place in the queue
--          {'count', made, serial}  the latch was made with another count; likewise
--          0 .. serial              the token was ended before this request arrived
--          {token, an hour, ticket, place lost, '', serial}  it is not open; as a refusal of acquire. No
--              holder ends the wait, so the client requests again only after a long time
--
-- Waiting makes the latch, so that others see how many are left.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, place, count, serial = ARGV[1], ARGV[3], tonumber(ARGV[5]), ARGV[7]

--:include _latch

local made, counted = read_latch()
if counted == count and made == count then
  keep_latch(made, count, ARGV[6])
  call('ZREM', queue, token, '!' .. token)
  return {'open', serial}
end
if made and made ~= count then
  call('ZREM', queue, token, '!' .. token)
  return {'count', made, serial}
end

-- The score of a member of the queue, or nil (see acquire).
local function score(member)
  return call('ZADD', queue, 'XX', 'INCR', 0, member)
end

-- Skip tombstones to find the last waiter's ticket.
local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])
if last and last >= 1e16 then
  if score('+' .. token) then
    return '0' .. serial
  end
  local newest = call('ZRANGE', queue, '(1e16', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
  last = tonumber(newest[2])
end

--:include _join_queue

keep_latch(made, count, ARGV[6])
local ticket, place_lost = '0', 0
if place ~= '' then
  ticket, place_lost = join_queue()
end
return {token, 3600000, ticket, place_lost, '', serial}
