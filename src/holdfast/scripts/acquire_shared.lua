-- acquire_shared: grant permits if they are free, or join the queue. Times in ms, fences and tickets
-- in µs.
--
-- KEYS  1 holders (see _holders)
--       2 fence counter
--       3 queue
-- ARGV  1 token, which ends with its permits (see _holders)
--       2 to 5 as acquire
--
-- Returns  as acquire. The holder in a refusal is the one whose lease expires first: then the caller
--          requests again, and is granted its permits if that holder has ended without a release. A
--          refusal contains no message, but the permits in use before the serial.
--
-- A request joins the queue behind other waiters, even if its permits are free: so a writer is not
-- overtaken by readers, nor a large weight by small ones.
--
-- Fences: several holders have different ones, and none of them is stored. So the reply to a retry
-- has a new fence, as has that to a confirmation (see renew_shared). The promises about fences hold:
--   S6  Each fence is returned once, because each raises the counter.
--   S7  A client uses the fence of its last reply, or of a push since. The token was a holder when
--       that was made. Leases that exclude this one were granted before the token became a holder, and
--       have lower fences; or after its end, and have higher ones.
--   S8  A renewal returns the fence that it was given. A downgrade changes none.
--   S9  The token is a member of a set, so a retry takes no second permits. The client never uses the
--       fence of a reply that was lost.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, serial = ARGV[1], tonumber(ARGV[2]), ARGV[#ARGV]
local place, settings = '', ''
if #ARGV > 3 then
  place, settings = ARGV[3], ARGV[4]
end
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _fence
--:include _holders

-- The fence is written before the holder: a script that fails in between leaves no permits held.
if settings == '' and call('EXISTS', lock, queue) == 0 then
  local fence = new_fence()
  admit(token, ttl, fence)
  return fence .. serial
end

local quiet = true  -- a grant in the reply could meet the caller's own one
--:include _settings
--:include _quarantine
local quarantined = quarantine()
if quarantined then
  return redis.error_reply('QUARANTINE ' .. quarantined)
end

--:include _released
--:include _hand_out

-- The score of a member of the queue, or nil.
local function score(member)
  return call('ZADD', queue, 'XX', 'INCR', 0, member)
end

-- The last member shows whether there are tombstones. Skip them to find the last waiter's ticket.
local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])
if last and last >= 1e16 then
  if score('+' .. token) then
    return '0' .. serial
  end
  local newest = call('ZRANGE', queue, '(1e16', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
  last = tonumber(newest[2])
end

local function leave_queue()
  return call('ZREM', queue, token, '!' .. token) > 0
end

-- A retry. The expiry is written even if unchanged.
local expiry, after_loss = expiry_of(token)
if expiry then
  local fence = new_fence(after_loss)
  hold(token, ttl, after_loss)
  leave_queue()
  return fence .. serial
end

local used, holder, left = usage()
local weight, limit = permits_of(token)

local function grant()
  local fence = new_fence(was_lost())
  admit(token, ttl, fence)
  return fence .. serial
end

if not last and used + weight <= limit then
  return grant()
end

--:include _join_queue
local ticket, place_lost = '0', 0
if place ~= '' then
  ticket, place_lost = join_queue()
end
local fence, pushed
if last or place ~= '' then
  fence, pushed, used = hand_out(used, left or 0, true)  -- the first waiter may be gone
end
if fence then
  return fence .. serial
end
if publish_error then
  leave_queue()
  return publish_error
end
-- Invariant: a request without a place does not change the queue (see acquire). Its token may have a
-- place that a later request took.
if place == '' and used + weight <= limit then
  local first = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
  if not first then
    return grant()
  end
end
if pushed then
  used, holder, left = usage()
end
return {holder or '', left or window, ticket, place_lost, '', used, serial}
