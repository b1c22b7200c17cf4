-- Included by scripts that grant permits to waiters: `hand_out`. All times are in ms. Needs: call, lock,
-- queue, token, ttl, quiet, and what _settings, _quarantine, _fence, _released and _holders define.

--:include _notify

--:include _notify_first
--:include _notify_backup
-- Grants permits to waiters in the order of the queue, until the next one does not fit. So readers
-- that are next to each other in the queue are granted together, and no waiter is overtaken. Waiters
-- whose clients are not subscribed are removed.
--
-- `used` is the weights in use. Returns the fence if the caller was granted permits, the client of
-- the last other waiter that was, the weights in use afterwards, and whether a waiter was removed.
--
-- One grant fits into the reply (see _notify). The next ones are published. In a quarantine nothing
-- is granted, as in hand_over. One script grants to 200 waiters at most, in about 10 ms: meanwhile
-- the server serves no other client.
local function share_out(used)
  local own_fence, pushed, fence, removed
  for _ = 1, 200 do
    if quarantine() then
      break
    end
    local waiters = call('ZRANGE', queue, 0, 0, 'WITHSCORES')
    local waiter, ticket = waiters[1], waiters[2]
    if not waiter or tonumber(ticket) >= 1e16 then
      break
    end
    local weight, limit = permits_of(waiter)
    if used + weight > limit then
      break
    end
    local grantee, client = parse_waiter(waiter)
    call('ZREM', queue, grantee, '!' .. grantee)
    fence = fence or new_fence(was_lost())
    local px
    if grantee == token then
      own_fence, px = fence, ttl
    elseif notify(waiter, 'G', fence, window) then
      pushed, px, quiet = client, window, quiet or reply_grant ~= nil
    elseif publish_error then
      call('ZADD', queue, ticket, waiter)
      break
    end
    if px then
      admit(grantee, px, fence)
      used, fence = used + weight, nil
    else
      removed = true
    end
  end
  if fence and call('EXISTS', lock) == 0 then
    mark_released()  -- as in hand_over
  end
  return own_fence, pushed, used, removed
end

-- Grants permits to waiters, and notifies those that have to request later: the first one, if there
-- is a new one, and a backup after grants (see notify_backup).
--
-- `left` is in how many ms the first lease would have expired before these grants, which the waiters
-- know. `is_new` means that the first waiter has to be notified even if none was granted permits: it
-- is a new one, or it may be gone. Returns the fence if the caller was granted permits, whether another
-- waiter was, and the weights in use afterwards.
--
-- Invariant: a waiter that is gone does not block the waiters behind it.
-- Killed client: its waiter is the first one, and takes more permits than are free.
-- Waiters behind it: their requests fit, and find it there.
-- Without a message to it, nothing would show that it is gone while the holders renew their leases.
local function hand_out(used, left, is_new)
  local fence, pushed, own, client, watching, removed, fits
  while true do
    own, client, used, removed = share_out(used)
    fence, pushed, is_new = fence or own, client or pushed, is_new or removed
    local first = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
    if not first or not (fence or pushed or is_new) then
      break
    end
    _, watching = parse_waiter(first)
    local weight, limit = permits_of(first)
    fits = used + weight <= limit and not quarantine()
    if watching == pushed and not fits then
      break  -- a client that was granted permits knows when the window is over
    end
    local wait = window
    if fits then
      wait = 0  -- share_out has granted to as many as it may: the next request continues
    elseif not pushed then
      wait = select(3, usage()) or 0
    end
    local notified = notify_first('W', wait)
    if fits then
      break
    end
    if notified == first or not notified or publish_error then
      break
    end
    -- The first waiter was removed, because its client is not subscribed. The next one may fit.
  end
  if pushed and watching and (fits or left > window) then
    notify_backup(pushed, watching, 2 * window)
  end
  return fence, pushed, used
end
