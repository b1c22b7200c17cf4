-- Included by scripts that notify waiters: `notify`. All times are in ms.
-- Needs: call, lock, token, delay, quiet.
--
-- A waiter is a member of the queue: its token, with its ticket as score (below 1e16, see
-- _tombstone). A '!' before the token means that the client is subscribed on another server: it is
-- granted the lock even if PUBLISH counts no receiver here. Messages go to the channel of the
-- waiter's client:
--   <kind>:<fence>:<px>[ <delay>]:<length of the token>:<token><lock's key>
-- kind is G (granted for px ms), A (request the lock now) or W (request it in px ms). The delay is
-- for a client that does not know the token any more, and has to release the grant.
--
-- A grant to the client that runs the script goes into the reply, as `reply_grant`: the client
-- receives it earlier, and without pub/sub. With `quiet` it is published, because the reply is not
-- read.

--:include _publish

-- The error reply if the server refuses to publish. No waiter is notified or removed then.
local publish_error

local reply_grant

-- The token of a waiter, its client's name, and whether the waiter counts without a receiver ('!').
local function parse_waiter(waiter)
  local uncounted = string.byte(waiter) == 33
  local waiter_token = uncounted and string.sub(waiter, 2) or waiter
  return waiter_token, string.match(waiter_token, '^[^:]*:([^:]*)') or '', uncounted
end

local _, own_client = parse_waiter(token)

-- Notifies a waiter; returns false if its client is not subscribed.
local function notify(waiter, kind, fence, px)
  local waiter_token, client, uncounted = parse_waiter(waiter)
  local time = delay > 0 and px .. ' ' .. delay or px
  local message = kind .. ':' .. fence .. ':' .. time .. ':' .. #waiter_token .. ':' .. waiter_token .. lock
  if kind == 'G' and client == own_client and not quiet then
    reply_grant = message
    return true
  end
  local receivers = publish(client, message)
  if type(receivers) == 'table' then
    publish_error = receivers
    return false
  end
  return receivers > 0 or uncounted
end
