-- A part of scripts that hand the lock over. Needs: call, lock, queue, token, ttl, settings' names,
-- quarantine, new_fence, quiet.
--
-- A waiter stands in the queue as its token, by its ticket (below 1e16: see tombstone); with a '!'
-- before it, it is granted also when nobody seems to hear it, because the server it listens on is not
-- this one. Messages go to the channel of its client:
-- <kind>:<fence>:<px>[ <delay>]:<length of the token>:<token><lock's key>, where kind is G (the lock is
-- yours for px ms), A (ask again now) or W (ask again in px ms). Whoever hands a grant back needs the
-- delay: it may know nothing else of the lock.
--
-- A grant to the very client that runs the script is not published but answered, as `answer`: it
-- needs no push, and arrives sooner. Not so if `quiet`: then nobody reads the answer.

--:include _publish

-- What the server said when it did not let us publish: then nobody is told, and nobody is dropped.
local denied

-- Long enough to be taken up by a busy process, and no longer than the ttl if that is.
local window = math.max(250, math.min(ttl, 3000))
local answer

-- The token of a waiter, the name of its client, and whether it counts as there although unheard.
local function read(waiter)
  local uncounted = string.byte(waiter) == 33
  local who = uncounted and string.sub(waiter, 2) or waiter
  return who, string.sub(who, 5, (string.find(who, ':', 5, true) or 5) - 1), uncounted
end

local _, own = read(token)

-- Says it to a waiter; false if its client is gone.
local function tell(waiter, kind, fence, px)
  local who, client, uncounted = read(waiter)
  local time = delay > 0 and px .. ' ' .. delay or px
  local message = kind .. ':' .. fence .. ':' .. time .. ':' .. #who .. ':' .. who .. lock
  if kind == 'G' and client == own and not quiet then
    answer = message
    return true
  end
  local heard = publish(client, message)
  if type(heard) == 'table' then
    denied = heard
    return false
  end
  return heard > 0 or uncounted
end

-- Tells the waiter at `index`, and says whether there is one. Those whose client is gone are dropped
-- on the way; the one who asks is not told what it hears as the answer.
local function tell_next(index, kind, px)
  while true do
    local waiter = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', index, 1)[1]
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

-- Gives the lock, which nobody has or wants any more, to the first waiter whose client is there, and
-- returns who that is, and its fence. The next in line is to look after the grant's window whether it
-- was taken up; if it is of the same client, that one looks by itself. A lock without order is left
-- free, and the first is to ask. In a quarantine it is left free too: this may be the second sending of
-- a release that the server before this one carried out, and then somebody else has it from there.
-- Those who wait have all been told when it ends.
local function hand_over()
  if quarantine() > 0 then
    return nil
  end
  if order == 'barge' then
    if tell_next(0, 'A', 0) then
      tell_next(1, 'W', window)
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
    call('ZREM', queue, waiter)
    fence = fence or new_fence()
    local who, client = read(waiter)
    if who == token then
      grant(who, ttl)
      return who, fence
    end
    if tell(waiter, 'G', fence, window) then
      grant(who, window)
      local _, seconds = read(second or waiter)
      if seconds ~= client then
        tell_next(0, 'W', window)
      end
      return who, fence
    end
    if denied then
      call('ZADD', queue, ticket, waiter)
      return nil
    end
  end
end
