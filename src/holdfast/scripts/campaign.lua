-- campaign: acquire the lock of an election, and notify its observers if its holder has changed. Times
-- in ms.
--
-- KEYS  1 to 3 as acquire
--       4 observers: the queue of those that wait for a change (see observe)
-- ARGV  as acquire, with 3 and 4
--
-- Returns  as acquire
--
-- Invariant: an observer that is in the queue is notified of the next holder.
-- Candidate: it acquires the lock.
-- Observer: it finds the last holder, and joins the queue.
-- With two requests instead of one script, a candidate that dies between them would notify no observer.
--
-- An eviction and the end of a lease notify no observer. So an observer also requests again when the
-- lease that it knows should be over.

local before = redis.call('GET', KEYS[1])

local function acquire()
--:include acquire
end

local reply = acquire()
--:include _announce
return reply
