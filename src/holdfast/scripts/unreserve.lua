-- unreserve: return the last reservation of a rate, or forget the rate. Times in µs.
--
-- KEYS  1 rate (see rate)
-- ARGV  1 time that was reserved
--       2 token of the reservation; '' to forget the rate
--       3 serial of the request: three digits
--
-- Returns  {1, serial}  done
--          {0, serial}  not the last reservation any more: nothing was changed
--
-- Invariant: no two requests get the same capacity. A reserves, and then B, behind A. A ends its
-- wait early. If A's time were subtracted now, the next request would get a time before that of B,
-- and the requests after it B's. So only the last reservation is returned. Its token must match, not
-- only its time: this request may run twice, and another client may have reserved the same time in
-- between.

local key = KEYS[1]
if ARGV[2] == '' then
  redis.call('DEL', key)
  return {1, ARGV[3]}
end
local full_at, token = string.match(redis.call('GET', key) or '', '^(%d+) (.+)$')
if token ~= ARGV[2] then
  return {0, ARGV[3]}
end
full_at = full_at - ARGV[1]
local clock = redis.call('TIME')
local left = full_at - (clock[1] * 1000000 + clock[2])
if left > 0 then
  redis.call('SET', key, string.format('%.0f', full_at), 'PX', math.ceil(left / 1000) + 1)
else
  redis.call('DEL', key)
end
return {1, ARGV[3]}
