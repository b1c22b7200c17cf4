local call = redis.call
local time = call('TIME')
local function now_in(unit)
  return string.format('%.0f', time[1] * unit + math.floor(time[2] * unit / 1000000))
end

-- Whether the client of a waiter is subscribed to its channel (see _publish). The client of a
-- killed process is not. Unknown (-1) for a client that is subscribed on another server (its token
-- begins with '!'), and if this user may not run PUBSUB.
local subscribed = {}
local function is_subscribed(waiter)
  if string.byte(waiter) == 33 then
    return -1
  end
  local client = string.match(waiter, '^[^:]*:([^:]*)') or ''
  if not subscribed[client] then
    local count, channel = 'NUMSUB', 'holdfast:push:' .. client
    if string.byte(client) == 126 then
      count, channel = 'SHARDNUMSUB', channel .. ':' .. string.match(KEYS[2], '{[^}]+}')
    end
    local reply = redis.pcall('PUBSUB', count, channel)
    subscribed[client] = reply.err and -1 or math.min(reply[2], 1)
  end
  return subscribed[client]
end

local queue = call('ZRANGE', KEYS[3], '-inf', '(1e16', 'BYSCORE', 'WITHSCORES')
local waiting, gone, waiters, wanted = 0, 0, {}, tonumber(ARGV[1])
for index = 1, #queue, 2 do
  local listening = is_subscribed(queue[index])
  if listening == 0 then
    gone = gone + 1
  else
    waiting = waiting + 1
  end
  if wanted < 0 or listening ~= 0 and waiting <= wanted then
    local last = #waiters
    waiters[last + 1], waiters[last + 2], waiters[last + 3] = queue[index], queue[index + 1], listening
  end
end
