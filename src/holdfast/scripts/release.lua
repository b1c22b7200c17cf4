-- release: give the lock back if it is this token's, and hand it to whoever is next in line. Also
-- ends an attempt: the token is taken out of the line, and a grant it may have got is passed on.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 holds of the owner, if it has one
-- ARGV  1 token  2 ttl (ms)  3 life of the tombstone (ms), 0 for none; with ' lost' behind it, it is
--       the end of a lost lease, and the lock delay begins; with ' quiet', the answer is not to carry
--       a grant; with ' leave', the token only leaves the queue, and keeps what it may hold
--       4 settings  5 serial of the request
--       3 and 4 may be left out together if they are '0' and ''
--
-- Returns  1 .. serial  it was ours, and is not any more
--          0 .. serial  it was not ours
--          {serial}     it was not ours: there was no such key, and no tombstone of an eviction
--          {either, message, serial}  and a waiter of the same client was granted it (see
--          hand_over); not if there is a tombstone to be made: nobody may be there to read it
--
-- What needs memory goes last: a server that is out of it refuses only a script that has not written
-- anything yet.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, serial = ARGV[1], tonumber(ARGV[2]), ARGV[#ARGV]
local tombstone, settings = '0', ''
if #ARGV == 5 then
  tombstone, settings = ARGV[3], ARGV[4]
end
local holder = call('GET', lock)
local usual = settings == '' or settings == '0 barge '
local plain = holder == token and usual and tombstone == '0'
if plain and call('EXISTS', queue) == 0 then
  call('DEL', lock)
  return '1' .. serial
end

local quiet = tombstone ~= '0'
local life, how = string.match(tombstone, '^(%d+) ?(%a*)$')
--:include _settings
--:include _quarantine
--:include _fence
--:include _hand_over
--:include _owner
--:include _tombstone

local mine, missing = true, false
if plain then
  -- The commonest case: it goes from hand to hand.
  -- A waiter that sent a request in the last millisecond of its grant is in the queue again.
  call('ZREM', queue, token, '!' .. token)
  if not hand_over() then
    call('DEL', lock)
  end
else
  local was_first = read(call('ZRANGE', queue, 0, 0)[1] or '') == token
  call('ZREM', queue, token, '!' .. token)
  local remaining = call('PTTL', lock)
  local over = is_over(remaining)
  mine = not over and how ~= 'leave' and has_hold(holder, token)
  missing = not holder and not call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
  local last, left = true
  if mine then
    last, left = end_hold(holder, token)
  end
  if not last then
    tell_next('W', left)
  elseif how == 'lost' and holder and delay > 0 then
    if mine then
      call('PEXPIRE', lock, delay)
      tell_next('W', delay)
    end
  elseif mine or not holder or (over and holder == token and how ~= 'leave') then
    call('DEL', lock)
    hand_over()
  elseif remaining >= 0 and order ~= 'barge' then
    -- The first in the queue asks when a grant's window is over: from now on that is the next one.
    -- Nothing is granted to a waiter of a lock without order.
    if was_first then
      tell_next('W', remaining)
    end
    -- Within a grant's window, the one that leaves may be the second one that watches.
    local first = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
    if first and remaining <= window + delay then
      local _, client = read(holder)
      local _, watching = read(first)
      have_watched(client, watching, remaining + window)
    end
  end
end
if life ~= '0' then
  bury(token, tonumber(life))
end
if denied then
  return denied
end
if answer then
  return {mine and 1 or 0, answer, serial}
end
if missing then
  return {serial}
end
return (mine and '1' or '0') .. serial
