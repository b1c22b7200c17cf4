-- resign: release the lock of an election, and notify its observers if its holder has changed. Times in
-- ms.
--
-- KEYS  1 to 3 as release
--       4 observers (see observe)
-- ARGV  as release
--
-- Returns  as release
--
-- Invariant: as campaign. The next candidate, if there is one, has been granted the lock already. So
-- observers receive one message for both changes.

local before = redis.call('GET', KEYS[1])

local function release()
--:include release
end

local reply = release()
--:include _announce
return reply
