-- latch_state: read a latch, without any change.
--
-- KEYS  1 latch (see _latch)
-- ARGV  1 serial of the request: three digits
--
-- Returns  {made, counted, serial}  the count with which it was made, 0 if it does not exist; and how
--                                   many were counted

local call = redis.call
local lock = KEYS[1]

--:include _latch

local made, counted = read_latch()
return {made or 0, counted, ARGV[#ARGV]}
