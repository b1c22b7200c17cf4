-- acquire_all: grant several locks if all of them are free, otherwise none. Times in ms, fences in µs.
--
-- KEYS  for each lock: lock, fence counter, queue
-- ARGV  for each lock: token, ttl, lock delay; then
--       '+guard' for servers that may replace another one (see guard), or ''
--       serial of the request: three digits
--
-- Returns  {fence, ..., serial}  all are granted, by this request or by an earlier one with the same
--              tokens, with one fence for each lock
--          0 .. serial           nothing was changed: a lock is held, or its queue has waiters or
--              tombstones, or this server is in quarantine
--
-- Invariant: a request that arrives after one of its tokens was ended takes no lock.
-- Client: it abandons this request, and ends each token with a tombstone.
-- Server: a tombstone of one lock arrives, then this request, then the other tombstones.
-- A tombstone is in the queue of its lock. So a lock counts as free only if its queue does not exist.

local call = redis.call
local guarded, serial = ARGV[#ARGV - 1], ARGV[#ARGV]

--:include _quarantine

-- Writes the next fence of one lock and returns it.
local function next_fence(KEYS, ttl)
--:include _fence
  return new_fence()
end

local needed_free = {}
for first = 1, #KEYS, 3 do
  local ttl = tonumber(ARGV[first + 1])
  if not ttl or ttl < 1 then
    return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
  end
  needed_free[#needed_free + 1] = KEYS[first]
  needed_free[#needed_free + 1] = KEYS[first + 2]
end
if quarantine() then
  return '0' .. serial
end
local reply = {}
if call('EXISTS', unpack(needed_free)) > 0 then
  for first = 1, #KEYS, 3 do
    -- A retry? Its deadline counts from the first request, so the expiry need not be extended.
    if call('GET', KEYS[first]) ~= ARGV[first] or call('PTTL', KEYS[first]) <= tonumber(ARGV[first + 2]) then
      return '0' .. serial
    end
  end
  for first = 1, #KEYS, 3 do
    local fence = call('GET', KEYS[first + 1])
    reply[#reply + 1] = fence or next_fence({KEYS[first], KEYS[first + 1]}, tonumber(ARGV[first + 1]))
  end
else
  -- All fences come before the first lock: a script that fails in between leaves no lock held.
  for first = 1, #KEYS, 3 do
    reply[#reply + 1] = next_fence({KEYS[first], KEYS[first + 1]}, tonumber(ARGV[first + 1]))
  end
  for first = 1, #KEYS, 3 do
    call('SET', KEYS[first], ARGV[first], 'PX', ARGV[first + 1] + ARGV[first + 2])
  end
end
reply[#reply + 1] = serial
return reply
