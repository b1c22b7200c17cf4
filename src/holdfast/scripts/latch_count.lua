-- latch_count: count down a latch, once per id; the last one opens it, and notifies all waiters. Times
-- in ms.
--
-- KEYS  1 latch (see _latch)
--       2 fence counter, which a latch does not use
--       3 queue
-- ARGV  1 id
--       2 count of the latch; '' to open the latch if it exists
--       3 keep: life of the latch after its last use
--       4 serial of the request: three digits
--
-- Returns  {left, serial}          how many are left; 0 if it is open
--          {'count', made, serial} the latch was made with another count; nothing was changed
--
-- Invariant: no caller waits in the queue for a latch that is open.
-- Caller: it finds the latch closed, and joins the queue (see latch_wait).
-- Last count: it opens the latch, notifies all waiters, and removes them from the queue.
-- Each is one script. With two requests instead, the last count could come between those of a caller,
-- and no message would reach it.

local call = redis.call
local lock, queue, token, serial = KEYS[1], KEYS[3], ARGV[1], ARGV[4]

--:include _latch
--:include _notify_all

local made, counted = read_latch()
local count = tonumber(ARGV[2]) or made
if not count then
  return {0, serial}
end
if made and made ~= count then
  return {'count', made, serial}
end
keep_latch(made, count, ARGV[3])
if counted < count then
  local number = ARGV[2] == '' and count or counted + 1
  if call('ZADD', lock, 'NX', number, token) == 1 then
    counted = number
  end
end
if counted == count then
  notify_all()  -- in a retry too: the server may have refused to publish before
end
return publish_error or {count - counted, serial}
