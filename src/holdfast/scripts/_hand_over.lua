-- A part of scripts that hand the lock over. Needs: call, lock, queue, token, ttl, settings' names,
-- quarantine, new_fence, quiet.

--:include _tell

-- How long a grant is valid until its client is heard from (ms). A stopped process costs the waiters
-- behind it that long. A process that was only busy, and missed it, keeps its place in the queue by its
-- ticket, and gets the lock next.
local window = math.max(250, math.min(ttl, 1000))

-- Notifies the first waiter in the queue, and returns it if there is one. A waiter whose client is gone
-- is removed, and the next one is tried. The waiter that runs this script is not notified: it receives
-- the same as the reply.
local function tell_next(kind, px)
  while true do
    local waiter = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
    if not waiter or read(waiter) == token or tell(waiter, kind, 0, px) or denied then
      return waiter
    end
    call('ZREM', queue, waiter)
  end
end

local function grant(who, px)
  if order == 'forever' and who == token then
    call('SET', lock, who)
  else
    call('SET', lock, who, 'PX', px + delay)
  end
  -- Those of the same owner may have it too: let them ask.
  local group = string.match(who, ':&[^:]*$')
  for _, waiter in ipairs(group and call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE') or {}) do
    if string.sub(waiter, -#group) == group then
      tell(waiter, 'A', 0, 0)
    end
  end
end

-- Notifies one more waiter to ask after `px` ms, one window after the next waiter asks, because
-- `client`, which has the lock now, and `watching`, the client of the next waiter, may both be dead or
-- stopped. It is one of the last in the queue: processes of one machine often queue together, and are
-- stopped together.
-- After a hand-over it is needed only after a hold that had more than a window left. Waiters that queued
-- during a shorter one know from the reply that it ends soon, and ask then; and the waiter that was
-- notified at the end of the last long hold asks too, and goes on to do so until the lock is its own.
local function have_watched(client, watching, px)
  local waiters = call('ZRANGE', queue, '(1e16', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 8)
  for _, waiter in ipairs(waiters) do
    local who, other = read(waiter)
    if other ~= client and other ~= watching then
      if who == token or tell(waiter, 'W', 0, px) or denied then
        return
      end
      call('ZREM', queue, waiter)
    end
  end
end

-- Gives the lock, which nobody has or wants any more, to the first waiter whose client is there, and
-- returns who that is, and its fence. Other waiters watch whether that one takes it up. A lock without
-- order is left free, and the first waiter is to ask, or else one of another client, after a window: the
-- first one may be dead, and others of its process with it. In a quarantine it is left free too: this may be
-- the second sending of a release that the server before this one carried out, and then somebody else
-- has it from there. Those who wait have all been told when it ends.
local function hand_over()
  if quarantine() then
    return nil
  end
  if order == 'barge' then
    local first = tell_next('A', 0)
    if first then
      local _, client = read(first)
      have_watched(client, client, window)
    end
    return nil
  end
  local fence
  while true do
    local waiters = call('ZRANGE', queue, 0, 1, 'WITHSCORES')
    local waiter, ticket, second = waiters[1], waiters[2], waiters[3]
    if not waiter or tonumber(ticket) >= 1e16 then
      return nil
    end
    -- With and without its mark: a waiter that came back on another connection may stand there twice.
    -- If one of the two stayed, messages for the next waiter would go to the holder.
    local who, client = read(waiter)
    call('ZREM', queue, who, '!' .. who)
    fence = fence or new_fence()
    if who == token then
      grant(who, ttl)
      return who, fence
    end
    if tell(waiter, 'G', fence, window) then
      local left = second and call('PTTL', lock)
      grant(who, window)
      local _, watching = read(second or waiter)
      if watching ~= client then
        _, watching = read(tell_next('W', window) or waiter)
      end
      if second and (left < 0 or left > window + delay) then
        have_watched(client, watching, 2 * window)
      end
      return who, fence
    end
    if denied then
      call('ZADD', queue, ticket, waiter)
      return nil
    end
  end
end
