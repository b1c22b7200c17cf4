-- Adds the caller to the queue unless it is in there. Returns its ticket, 1 if the place of a given
-- ticket was lost, and whether the caller was added. A new ticket is the server's time, or the last
-- ticket + 1 if greater. So a returning waiter stays before later ones, and a ticket shows how long
-- its waiter waits.
local function join_queue()
  local mark, ticket = string.match(place, '^(!?)(%d*)$')
  local has_ticket, remarked = ticket ~= '' and ticket ~= '0'
  if has_ticket then
    remarked = call('ZREM', queue, (mark == '' and '!' or '') .. token) > 0
  else
    local time = call('TIME')
    ticket = time[1] * 1000000 + time[2]
    if last and last >= ticket then
      ticket = last + 1
    end
  end
  local added = call('ZADD', queue, 'NX', string.format('%.0f', ticket), mark .. token) == 1
  -- To save commands, only the first waiter of each minute extends the queue's expiry.
  if has_ticket or not last or last < ticket - ticket % 60000000 then
    call('PEXPIRE', queue, 3600000)
  end
  if not added and not has_ticket then
    ticket = score(mark .. token)
  end
  return string.format('%.0f', ticket), (has_ticket and added and not remarked) and 1 or 0, added
end
