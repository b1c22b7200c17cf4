-- A part of scripts that speak to those who wait. Needs: call, lock, token, delay, quiet.
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

local answer

-- The token of a waiter, the name of its client, and whether it counts as there although unheard.
local function read(waiter)
  local uncounted = string.byte(waiter) == 33
  local who = uncounted and string.sub(waiter, 2) or waiter
  return who, string.match(who, '^[^:]*:([^:]*)') or '', uncounted
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
