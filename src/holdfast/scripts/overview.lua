-- overview: all there is to see of a lock, for people. Changes nothing.
--
-- KEYS  1 lock  2 fence counter  3 queue  4 holds of the owner, if it has one
-- ARGV  1 how many waiters to tell of, first come, first told; -1 for all  2 serial of the request
--
-- Returns  {holder's token or '', left (ms), last fence or '', time (µs), holds, how many wait,
--          waiters, serial}
--          left is -1 if it never expires, -2 if nobody holds it; holds are tokens, each followed by
--          the moment (ms) it expires at, as in _owner; waiters are tokens (see _hand_over), each
--          followed by its ticket

local call = redis.call
local time = call('TIME')
local function at(unit)
  return string.format('%.0f', time[1] * unit + math.floor(time[2] * unit / 1000000))
end

local waiters = call('ZRANGE', KEYS[3], '-inf', '(1e16', 'BYSCORE', 'WITHSCORES')
local told, wanted = {}, tonumber(ARGV[1])
for index = 1, wanted < 0 and #waiters or math.min(#waiters, 2 * wanted) do
  told[index] = waiters[index]
end
return {
  call('GET', KEYS[1]) or '', call('PTTL', KEYS[1]), call('GET', KEYS[2]) or '', at(1000000),
  call('ZRANGE', KEYS[4], '(' .. at(1000), '+inf', 'BYSCORE', 'WITHSCORES'),
  #waiters / 2, told, ARGV[2]
}
