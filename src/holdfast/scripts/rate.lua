-- rate: take a cost from a rate, or reserve it for later (GCRA). Times in µs.
--
-- KEYS  1 rate: the time at which all capacity is available again, and the token of the last
--         reservation, if that request was the last one: 'time' or 'time token'
-- ARGV  1 time in which the cost becomes available
--       2 time in which a full burst becomes available, at least ARGV 1
--       3 longest wait; -2^53 to take nothing      with 3 and 4; otherwise the longest wait is 0
--       4 token of the reservation, or ''
--       last: serial of the request: three digits
--
-- Returns  {left, serial}  at least 0: what is left of the burst after this cost
--                          below 0: the wait for this cost, which is taken if the wait is not too
--                          long
--
-- All requests take from the same time, in the order in which the server runs them. A reservation
-- moves it too, so a later request never gets the capacity that an earlier one has reserved.

local key, token, serial = KEYS[1], ARGV[4], ARGV[#ARGV]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local value = redis.call('GET', key)
local full_at = value and (tonumber(value) or tonumber(string.match(value, '^%d+')))
if not full_at or full_at < now then
  full_at = now
end
full_at = full_at + ARGV[1]
local left = now + ARGV[2] - full_at
if left + (token and ARGV[3] or 0) >= 0 then
  value = string.format(token and '%.0f %s' or '%.0f', full_at, token)
  -- The expiry counts whole milliseconds. The key must not expire before its time.
  redis.call('SET', key, value, 'PX', math.ceil((full_at - now) / 1000) + 1)
end
return {left, serial}
