-- A part of scripts that speak to those who wait. Needs: call, lock, token, delay, quiet.
--
-- A waiter is in the queue as its token, by its ticket (below 1e16: see tombstone). Messages go to the
-- channel of its client:
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

local function client_in(waiter)
  return string.match(waiter, '^[^:]*:([^:]*)') or ''
end

local own = client_in(token)

-- Says it to a waiter; false if its client is gone.
local function tell(waiter, kind, fence, px)
  local client = client_in(waiter)
  local time = delay > 0 and px .. ' ' .. delay or px
  local message = kind .. ':' .. fence .. ':' .. time .. ':' .. #waiter .. ':' .. waiter .. lock
  if kind == 'G' and client == own and not quiet then
    answer = message
    return true
  end
  local heard = publish(client, message)
  if type(heard) == 'table' then
    denied = heard
    return false
  end
  return heard > 0
end
