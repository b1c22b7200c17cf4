-- release_all: delete each lock that has its token and for which no client waits.
--
-- It is the first path of release, for several locks without a lock delay. The others, and those for
-- which clients wait, are left for release.
--
-- KEYS  for each lock: lock, fence counter, queue
-- ARGV  for each lock: token; then
--       serial of the request: three digits
--
-- Returns  {1 or 0, ..., serial}  for each lock: 1 if it was released, 0 if nothing was changed

local call = redis.call
local reply = {}
for number = 1, #ARGV - 1 do
  local lock, queue = KEYS[3 * number - 2], KEYS[3 * number]
  local released = call('GET', lock) == ARGV[number] and call('EXISTS', queue) == 0
  if released then
    call('DEL', lock)
    if call('INCRBY', KEYS[3 * number - 1], '1') == 1 then  -- see _released
      call('DEL', KEYS[3 * number - 1])
    end
  end
  reply[number] = released and 1 or 0
end
reply[#ARGV] = ARGV[#ARGV]
return reply
