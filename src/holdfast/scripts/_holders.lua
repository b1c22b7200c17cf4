-- Included by scripts on permits: the holders. All times are in ms. Needs: call, lock.
--
-- Semaphores and rwlocks share this protocol. A holder is a member of a sorted set: its token, with
-- the time at which its lease expires, by the server's clock, as score. The end of a token has the
-- permits that it takes, and the limit: ':$<weight>/<limit>'. A token is granted its permits while
-- the weights of all holders and its own are together at most its own limit. A reader of an rwlock
-- has the weight 1, and a writer that of the whole limit.
--
-- Each holder expires by itself, as a key does: it is valid until the end of that millisecond. The
-- key expires with the last holder, 1 ms later: TIME may be ahead of the clock by which keys expire.
--
-- after_loss (see _fence): half a millisecond in the score of a holder means that its fence ends with 2,
-- because a retry and a confirmation have to return the same. A holder whose lease ended without a
-- release stays as a member, which is expired, until the next grant. If the key is gone, the counter
-- shows whether its last holder was released.

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function permits_of(its_token)
  local weight, limit = string.match(its_token, ':%$(%d+)/(%d+)$')
  return tonumber(weight or 1), tonumber(limit or 1)
end

-- When the lease of a token expires, and whether it is after_loss; nil if the token has none. (ZSCORE
-- would need one more command in the ACL rule.) A server without memory refuses ZADD to a script that
-- has not written yet.
local function expiry_of(its_token)
  local score = tonumber(call('ZADD', lock, 'XX', 'INCR', 0, its_token) or 0)
  if score >= now then
    return math.floor(score), score % 1 > 0
  end
end

-- Makes a token a holder for `px` from now, or extends its lease. A lease is never shortened.
local function hold(its_token, px, after_loss)
  call('ZADD', lock, 'GT', now + px + (after_loss and 0.5 or 0), its_token)
  call('PEXPIRE', lock, math.max(call('PTTL', lock), px + 1))
end

-- Ends the lease of a token without a release. The token stays as an expired member. If no holder is
-- left, the key is deleted, and the counter shows the loss.
local function end_unreleased(its_token)
  call('ZADD', lock, 'XX', now - 1, its_token)
  if not call('ZRANGE', lock, now, '+inf', 'BYSCORE', 'LIMIT', 0, 1)[1] then
    call('DEL', lock)
  end
end

-- Whether a lease has ended without a release since the last grant: true or false; nil if the key does
-- not exist, and only the counter shows it.
local function was_lost()
  if call('ZRANGE', lock, '-inf', '(' .. now, 'BYSCORE', 'LIMIT', 0, 1)[1] then
    return true
  end
  if call('EXISTS', lock) == 1 then
    return false
  end
end

-- The weights in use, the holder whose lease expires first, and in how many ms. With many holders
-- this takes the most time, about 0.3 µs for each of them.
local function usage()
  local used, holders = 0, call('ZRANGE', lock, now, '+inf', 'BYSCORE')
  for _, holder in ipairs(holders) do
    used = used + permits_of(holder)
  end
  local first = holders[1]
  return used, first, first and expiry_of(first) - now
end

-- Makes a token a holder under a new fence. The losses before it are reported by this fence.
local function admit(its_token, px, fence)
  repeat
    local expired = call('ZRANGE', lock, '-inf', '(' .. now, 'BYSCORE', 'LIMIT', 0, 100)
    if #expired > 0 then
      call('ZREM', lock, unpack(expired))
    end
  until #expired < 100
  hold(its_token, px, string.byte(fence, -1) == 50)  -- '2'
end
