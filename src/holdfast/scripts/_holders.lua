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

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function permits_of(its_token)
  local weight, limit = string.match(its_token, ':%$(%d+)/(%d+)$')
  return tonumber(weight or 1), tonumber(limit or 1)
end

-- When the lease of a token expires; nil if the token has none. (ZSCORE would need one more command
-- in the ACL rule.) A server without memory refuses ZADD to a script that has not written yet.
local function expiry_of(its_token)
  local expiry = tonumber(call('ZADD', lock, 'XX', 'INCR', 0, its_token) or 0)
  return expiry >= now and expiry or nil
end

-- Makes a token a holder for `px` from now, or extends its lease. A lease is never shortened.
local function hold(its_token, px)
  call('ZADD', lock, 'GT', now + px, its_token)
  call('PEXPIRE', lock, math.max(call('PTTL', lock), px + 1))
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

local function remove_expired()
  local expired = call('ZRANGE', lock, '-inf', '(' .. now, 'BYSCORE', 'LIMIT', 0, 100)
  if #expired > 0 then
    call('ZREM', lock, unpack(expired))
  end
end
