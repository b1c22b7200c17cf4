-- start: acquire the lock of a periodic job and record the start of its run, or return why not. Times in
-- ms, fences in µs.
--
-- KEYS  1 lock
--       2 fence counter
--       3 queue
--       4 last start: '<time> <fence> <every> <offset> <at_least> <token>'
-- ARGV  1 to 4 as acquire
--       5 every: the length of a period
--       6 offset of the periods from the epoch
--       7 at_least: the shortest time between two starts
--       8 life of the record
--       9 number of the period in which the caller wants to start, or '' if it does not know it yet
--       10 serial of the request: three digits
--
-- Returns  {'running', '<fence> <token>', now, left, serial}   the holder of the lock runs the job
--          {'done', last start, now, period, serial}      the present period has begun a run
--          {'too_soon', last start, now, period, serial}  the last start is less than at_least ago
--          {'ready', last start, now, period, serial}     it may start, with this period as 9
--          otherwise as acquire
--
-- Invariant: a period has at most one start, by this server's clock.
-- Caller: it sees that the last start was in an earlier period, and acquires the lock.
-- Other caller: it does the same at the same time.
-- With two requests instead of one script, the second caller could acquire the lock after the first
-- one has released it, in the same period.
--
-- A retry finds its token in the lock, and changes nothing. A grant has no room for the number of its
-- period and for the start before it. So the caller receives them first, and names the period in a
-- second request. They are still true then: a start in between would be in that period.

local time, serial = redis.call('TIME'), ARGV[10]
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local every, offset, at_least = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local function period_of(moment)
  return math.floor((moment - offset) / every)
end

local holder, last, period = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[4]) or '', period_of(now)
local is_retry = holder == ARGV[1]
if holder and not is_retry then
  local fence = redis.call('GET', KEYS[2]) or '0'
  return {'running', fence .. ' ' .. holder, now, redis.call('PTTL', KEYS[1]), serial}
end
if not is_retry then
  local started = tonumber(string.match(last, '^%d+'))
  if started and period_of(started) >= period then
    return {'done', last, now, period, serial}
  end
  if started and now - started < at_least then
    return {'too_soon', last, now, period, serial}
  end
  if ARGV[9] ~= string.format('%.0f', period) then
    return {'ready', last, now, period, serial}
  end
end

local function acquire()
--:include acquire
end

local reply = acquire()
if not is_retry and redis.call('GET', KEYS[1]) == ARGV[1] then
  local fence = redis.call('GET', KEYS[2])
  local start = {string.format('%.0f', now), fence, ARGV[5], ARGV[6], ARGV[7], ARGV[1]}
  redis.call('SET', KEYS[4], table.concat(start, ' '), 'PX', ARGV[8])
  -- The next run is a period later, and has to know whether this one was lost (see _fence).
  redis.call('PEXPIRE', KEYS[2], math.max(redis.call('PTTL', KEYS[2]), tonumber(ARGV[8])))
end
return reply
