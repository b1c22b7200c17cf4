-- release: give the lock back if it is still this token's.
--
-- KEYS  1 lock  2 tombstone of this token, if it is to have one
-- ARGV  1 token  2 life of the tombstone (ms), 0 for none  3 serial of the request
--
-- Returns  1 .. serial  it was ours and is free now
--          0 .. serial  it was not ours
--
-- The tombstone is for a token one of whose requests was abandoned and may still arrive: it must
-- find that it comes too late. The delete goes first, because a server that is out of memory
-- refuses a script's first write only if that write could need memory.

local mine = redis.call('GET', KEYS[1]) == ARGV[1]
if mine then
  redis.call('DEL', KEYS[1])
end
if ARGV[2] ~= '0' then
  redis.pcall('SET', KEYS[2], '', 'PX', ARGV[2])
end
return (mine and '1' or '0') .. ARGV[3]
