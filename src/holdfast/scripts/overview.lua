-- overview: all there is to see of a lock, for people. Changes nothing.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 holds of the owner, if it has one
-- ARGV  1 how many of the waiters that may listen to return, in the order of the queue; -1 for all
--       waiters  2 serial of the request
--
-- Returns  {holder's token or '', left (ms), last fence or '', time (µs), holds, waiting, gone,
--          waiters, serial}
--          left is -1 if it never expires, -2 if nobody holds it; holds are tokens, each followed by
--          the moment (ms) it expires at, as in _owner; waiting and gone are how many waiters may
--          listen, and how many do not; waiters are tokens (see _tell), each followed by its ticket
--          and by whether its client listens: 1 yes, 0 no, -1 unknown

local call = redis.call
local time = call('TIME')
local function at(unit)
  return string.format('%.0f', time[1] * unit + math.floor(time[2] * unit / 1000000))
end

-- Whether the client of a waiter is subscribed to its channel (see _publish). A client that was killed
-- is not. Unknown for a client that listens on another server (its token begins with a '!'), and if
-- this user may not run PUBSUB: then it counts as a waiter.
local subscribed = {}
local function listens(waiter)
  if string.byte(waiter) == 33 then
    return -1
  end
  local client = string.match(waiter, '^[^:]*:([^:]*)') or ''
  if not subscribed[client] then
    local count, channel = 'NUMSUB', 'holdfast:push:' .. client
    if string.byte(client) == 126 then
      count, channel = 'SHARDNUMSUB', channel .. ':' .. string.match(KEYS[2], '{[^}]+}')
    end
    local answer = redis.pcall('PUBSUB', count, channel)
    subscribed[client] = answer.err and -1 or math.min(answer[2], 1)
  end
  return subscribed[client]
end

local queue = call('ZRANGE', KEYS[3], '-inf', '(1e16', 'BYSCORE', 'WITHSCORES')
local waiting, gone, waiters, wanted = 0, 0, {}, tonumber(ARGV[1])
for index = 1, #queue, 2 do
  local heard = listens(queue[index])
  if heard == 0 then
    gone = gone + 1
  else
    waiting = waiting + 1
  end
  if wanted < 0 or heard ~= 0 and waiting <= wanted then
    local last = #waiters
    waiters[last + 1], waiters[last + 2], waiters[last + 3] = queue[index], queue[index + 1], heard
  end
end
return {
  call('GET', KEYS[1]) or '', call('PTTL', KEYS[1]), call('GET', KEYS[2]) or '', at(1000000),
  call('ZRANGE', KEYS[4], '(' .. at(1000), '+inf', 'BYSCORE', 'WITHSCORES'),
  waiting, gone, waiters, ARGV[2]
}
