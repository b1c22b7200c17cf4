-- release: end the token's hold, and grant the lock to the first waiter. Times in ms.
--
-- It also ends an attempt to acquire: the token leaves the queue. If it was granted the lock in the
-- meantime, the lock is granted to the next waiter. This also happens if the lock is found free: the
-- last lease may just have expired, and no waiter may have requested the lock since.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 holds of the owner, if there is one
-- ARGV  1 token
--       2 ttl of the lease: the window and the life of the counter follow from it
--       3 life of the tombstone, 0 for none; it may be followed by
--         ' lost'   the lease was lost: the lock delay begins
--         ' seen'   a user has had the lease (see _released). Without 3 it has, too
--         ' quiet'  the reply is not to contain a grant
--         ' leave'  the token only leaves the queue, and keeps a lock that it holds
--       4 settings (see _settings)
--       5 serial of the request: three digits
--       3 and 4 may be left out together if they are '0' and '': the client packs two arguments
--         faster
--
-- Returns  1 .. serial  the token held the lock, and does not hold it any more
--          0 .. serial  the token did not hold the lock
--          {serial}     as 0; the lock's key does not exist, and no tombstone shows an eviction
--          {1 or 0, message, serial}  as the first two, and a waiter of the same client was granted
--              the lock (see _notify); not with a tombstone, because the reply may not be read then
--
-- Writes that need memory come last: a server without memory refuses only a script that has not
-- written yet.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, serial = ARGV[1], ARGV[#ARGV]
local tombstone, settings = '0', ''
if #ARGV == 5 then
  tombstone, settings = ARGV[3], ARGV[4]
end
local holder = call('GET', lock)
local simple_settings = settings == '' or settings == '0 barge '  -- not fair; no lock delay, no owner
local fast_path = holder == token and simple_settings and tombstone == '0'
if fast_path and call('EXISTS', queue) == 0 then
  call('DEL', lock)
  if #ARGV > 3 then
    --:include _released
    mark_released()
  elseif call('INCRBY', KEYS[2], '1') == 1 then  -- as mark_released(true), but faster
    call('DEL', KEYS[2])
  end
  return '1' .. serial
end

local ttl, tombstone_ms, mode = tonumber(ARGV[2]), string.match(tombstone, '^(%d+) ?(%a*)$')
-- With a tombstone, or a mode other than 'seen', the client may not read the reply: it gets no grant.
local seen, quiet = #ARGV == 3 or mode == 'seen', tombstone ~= '0' and tombstone ~= '0 seen'
--:include _settings
--:include _quarantine
--:include _fence
--:include _released
--:include _hand_over
--:include _owner
--:include _tombstone

local was_held, missing = true, false
if fast_path then
  -- The token may be in the queue again, if its waiter sent a request just before its grant
  -- expired.
  call('ZREM', queue, token, '!' .. token)
  mark_released(seen)
  if not hand_over() then
    call('DEL', lock)
  end
else
  local was_first = parse_waiter(call('ZRANGE', queue, 0, 0)[1] or '') == token
  call('ZREM', queue, token, '!' .. token)
  local remaining = call('PTTL', lock)
  local over = is_over(remaining)
  was_held = not over and mode ~= 'leave' and has_hold(holder, token)
  -- ZADD: has the token a tombstone?
  missing = not holder and not call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)
  local last_hold, left = true, nil
  if was_held then
    last_hold, left = end_hold(holder, token)
    if last_hold and mode ~= 'lost' then
      mark_released(seen)
    end
  end
  if not last_hold then
    notify_two('W', left)
  elseif mode == 'lost' and holder and delay > 0 then
    if was_held then
      call('PEXPIRE', lock, delay)
      notify_two('W', delay)
    end
  elseif was_held or not holder or (over and holder == token and mode ~= 'leave') then
    if not hand_over() then
      call('DEL', lock)
    end
  elseif remaining >= 0 and order ~= 'barge' then
    -- Invariant: after a grant, the first waiter and one of another client request the lock when
    -- the window has ended. (With order 'barge', waiters are never granted the lock.)
    -- Leaving waiter: it is one of these two, and is removed from the queue above.
    -- New holder: it is dead or stopped, and does not use its grant.
    -- Without these messages, the remaining waiters wait until the end of the previous lease.
    if was_first then
      notify_first('W', remaining)
    end
    local first = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
    if first and remaining <= window + delay then
      local _, client = parse_waiter(holder)
      local _, watching = parse_waiter(first)
      notify_backup(client, watching, remaining + window)
    end
  end
end
if tombstone_ms ~= '0' then
  add_tombstone(token, tonumber(tombstone_ms))
end
if publish_error then
  return publish_error
end
if reply_grant then
  return {was_held and 1 or 0, reply_grant, serial}
end
if missing then
  return {serial}
end
return (was_held and '1' or '0') .. serial
