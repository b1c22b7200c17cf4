-- acquire: take the lock if it is free, and number the taking; stand in line if it is not.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 holds of the owner, if it has one
-- ARGV  1 token  2 ttl (ms)  3 place: '' not to wait, '0' at the end of the line, or a ticket; with
--       a '!' before it (see hand_over)  4 settings  5 serial of the request
--       3 and 4 may be left out together if both are ''
--
-- Returns  fence .. serial  the lock is the caller's, now or since an earlier sending
--          0 .. serial      the token was given up before this request arrived
--          {holder's token, left (ms), ticket, put back, message or '', serial}  somebody else's;
--          left is -1 if it never expires; put back is 1 if a ticket was given and its place was
--          gone; the message is a grant to another waiter of the same client (see hand_over)
--          or the error QUARANTINE <left, ms>: nobody gets a lock here until then (see guard)
--
-- When it is found free although somebody waits, the first of them gets it, whoever asks.

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

if settings == '' and call('EXISTS', lock, queue) == 0 then
  local fence = new_fence()
  call('SET', lock, token, 'PX', ARGV[2])
  return fence .. serial
end

local quiet
--:include _settings
--:include _quarantine
local quarantined = quarantine()
if quarantined then
  return redis.error_reply('QUARANTINE ' .. quarantined)
end

--:include _hand_over
--:include _owner

-- The score of a member of the queue, if it is one: ZSCORE, with the rights that a lock needs anyway.
local function score(member)
  return call('ZADD', queue, 'XX', 'INCR', 0, member)
end

local holder, left = call('GET', lock), call('PTTL', lock)
local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])
if last and last >= 1e16 then
  if score('+' .. token) then
    return '0' .. serial
  end
  local line = call('ZRANGE', queue, '(1e16', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
  last = tonumber(line[2])
end

local function leave_line()
  return call('ZREM', queue, token, '!' .. token) > 0
end

if not is_over(left) and (has_hold(holder, token) or is_owners(holder)) then
  -- A retry, or one more hold. The expiry is written even when unchanged, and never shortened.
  if order == 'forever' then
    call('SET', lock, holder)
  elseif left >= 0 then
    keep_hold(holder, token, left, ttl)
  end
  leave_line()
  return (call('GET', KEYS[2]) or new_fence()) .. serial
end

-- Stands in line, once, and returns the ticket, whether it had one and its place was lost, and whether
-- it was not in line before.
-- A ticket is the moment (µs, by the server's clock) at which its waiter came, or just above the last
-- one: so one who comes back is before all who came later, and who looks sees for how long they wait.
local function stand_in_line()
  local mark, ticket = string.match(place, '^(!?)(%d*)$')
  local had_one, remarked = ticket ~= '' and ticket ~= '0'
  if had_one then
    remarked = call('ZREM', queue, (mark == '' and '!' or '') .. token) > 0
  else
    local time = call('TIME')
    ticket = time[1] * 1000000 + time[2]
    if last and last >= ticket then
      ticket = last + 1
    end
  end
  local added = call('ZADD', queue, 'NX', string.format('%.0f', ticket), mark .. token) == 1
  -- Not for each who comes: the first of every minute is enough.
  if had_one or not last or last < ticket - ticket % 60000000 then
    call('PEXPIRE', queue, 3600000)
  end
  if not added and not had_one then
    ticket = score(mark .. token)
  end
  return string.format('%.0f', ticket), (had_one and added and not remarked) and 1 or 0, added
end

local ticket, put_back, added
if not holder then
  if order == 'barge' then
    leave_line()
    local fence = new_fence()
    grant(token, ttl)
    return fence .. serial
  end
  ticket, put_back, added = stand_in_line()
  local who, fence = hand_over()
  if who == token then
    return fence .. serial
  end
  holder, left = who or '', window + delay
elseif place ~= '' then
  ticket, put_back = stand_in_line()
end
if place == '' then
  -- If it was in the queue before, it stays there: this request may be older than the one that put it
  -- there, and may have been overtaken by it.
  if added then
    call('ZREM', queue, token)
  end
  ticket, put_back = '0', 0
end
if denied then
  leave_line()
  return denied
end
return {holder, left, ticket, put_back, answer or '', serial}
