-- Included by scripts that grant the lock to a waiter: `hand_over`. All times are in ms.
-- Needs: call, lock, queue, token, ttl, quiet, and what _settings, _quarantine, _fence and _released
-- define.

--:include _notify

--:include _notify_first
-- The lock delay after the lease of a token: that of its client, or of this request if that is
-- longer. They differ while a changed lock_delay is being deployed. With less than its own delay, the
-- client would take the lease for over.
local function delay_of(its_token)
  local its_delay = string.match(its_token, '^' .. string.rep('[^:]*:', 7) .. '%+(%d+)')
  return math.max(delay, tonumber(its_delay or 0))
end

local function grant(grantee, px)
  if order == 'forever' and grantee == token then
    call('SET', lock, grantee)
  else
    call('SET', lock, grantee, 'PX', px + delay_of(grantee))
  end
  -- Waiters of the same owner may hold the lock too: they are notified to request it.
  local group = string.match(grantee, ':&[^:]*$')
  for _, waiter in ipairs(group and call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE') or {}) do
    if string.sub(waiter, -#group) == group then
      notify(waiter, 'A', 0, 0)
    end
  end
end

--:include _notify_backup
-- Grants the lock, which is free or just released, to the first waiter whose client is subscribed.
-- Returns the token of that waiter and its fence, or nil. The next waiter is notified to request
-- the lock after the window, in case the new holder does not use its grant.
-- With order 'barge' the lock stays free, and the first waiter is notified to request it.
-- In a quarantine the lock stays free too. This request may be the retry of a release that the
-- previous primary carried out, and that primary may have granted the lock to another client.
-- Waiters know when the quarantine ends.
local function hand_over()
  if quarantine() then
    return nil
  end
  if order == 'barge' then
    notify_two('A', 0)
    return nil
  end
  local fence
  while true do
    local waiters = call('ZRANGE', queue, 0, 1, 'WITHSCORES')
    local waiter, ticket, second = waiters[1], waiters[2], waiters[3]
    if not waiter or tonumber(ticket) >= 1e16 then
      break
    end
    -- Remove it with and without its '!': a waiter that reconnected may be in the queue under both
    -- names. If one of them stayed, messages for the next waiter would go to the holder.
    local grantee, client = parse_waiter(waiter)
    call('ZREM', queue, grantee, '!' .. grantee)
    fence = fence or new_fence()
    if grantee == token then
      grant(grantee, ttl)
      return grantee, fence
    end
    if notify(waiter, 'G', fence, window) then
      local left = second and call('PTTL', lock)
      grant(grantee, window)
      local _, watching = parse_waiter(second or waiter)
      if watching ~= client then
        _, watching = parse_waiter(notify_first('W', window) or waiter)
      end
      if second and (left < 0 or left > window + delay) then
        notify_backup(client, watching, 2 * window)
      end
      return grantee, fence
    end
    if publish_error then
      call('ZADD', queue, ticket, waiter)
      break
    end
  end
  if fence then
    mark_released()  -- no waiter was granted the fence, so no lease of it can be lost
  end
  return nil
end
