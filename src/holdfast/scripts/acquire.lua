-- acquire: grant the lock if it is free, or join its queue. Times in ms, fences and tickets in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 holds of the owner, if there is one
-- ARGV  1 token
--       2 ttl
--       3 place: '' to join no queue, '0' to join it at the end, or a ticket to return to its
--         place; after a '!' if the client is subscribed on another server (see _notify)
--       4 settings (see _settings)
--       5 serial of the request: three digits
--       3 and 4 may be left out together if both are '': the client packs two arguments faster
--
-- Returns  fence .. serial  granted, by this request or by an earlier one with the same token
--          0 .. serial      the token was ended before this request arrived
--          {holder's token, left, ticket, place lost, message or '', serial}  not granted
--              left        time left of the lease, with the lock delay; -1 if it never expires
--              place lost  1 if a ticket was given and its waiter was not in the queue any more
--              message     a grant to another waiter of this client (see _notify)
--          error QUARANTINE <ms>  this server grants no lock for that time (see guard)
--
-- If the lock is free while others wait, the first waiter is granted it, not the caller.

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

-- The fence is written before the lock: a script that fails in between leaves no lock held.
if settings == '' and call('EXISTS', lock, queue) == 0 then
  local fence, after_loss
  --:include _next_fence
  call('SET', lock, token, 'PX', ARGV[2])
  return fence .. serial
end

--:include _fence

local quiet
--:include _settings
--:include _quarantine
local quarantined = quarantine()
if quarantined then
  return redis.error_reply('QUARANTINE ' .. quarantined)
end

--:include _released
--:include _hand_over
--:include _owner

-- The score of a member of the queue, or nil. ZSCORE would need one more command in the ACL rule.
local function score(member)
  return call('ZADD', queue, 'XX', 'INCR', 0, member)
end

local holder, left = call('GET', lock), call('PTTL', lock)
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

if not is_over(left) and (has_hold(holder, token) or is_same_owner(holder)) then
  -- A retry, or one more hold. The expiry is written even if unchanged, and never shortened.
  -- The fence comes first: it marks the holds of this grant (see _owner), and may have been evicted.
  local fence = call('GET', KEYS[2]) or new_fence()
  if order == 'forever' then
    call('SET', lock, holder)
  elseif left >= 0 then
    keep_hold(holder, token, left, ttl)
  end
  leave_queue()
  return fence .. serial
end

--:include _join_queue
local ticket, place_lost, added
if not holder then
  if order == 'barge' then
    leave_queue()
    local fence = new_fence()
    grant(token, ttl)
    return fence .. serial
  end
  ticket, place_lost, added = join_queue()
  local grantee, fence = hand_over()
  if grantee == token then
    return fence .. serial
  end
  holder, left = grantee or '', window + delay_of(grantee or '')
elseif place ~= '' then
  ticket, place_lost = join_queue()
end
if place == '' then
  -- Invariant: a request without a place does not change the queue.
  -- Client: it sends this request, abandons it, and then joins the queue with a second request.
  -- Server: the second request arrives first, this one afterwards.
  -- Without `added`, this request would remove the place that the second one took.
  if added then
    call('ZREM', queue, token)
  end
  ticket, place_lost = '0', 0
end
if publish_error then
  leave_queue()
  return publish_error
end
return {holder, left, ticket, place_lost, reply_grant or '', serial}
