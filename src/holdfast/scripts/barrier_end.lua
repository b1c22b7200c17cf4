-- barrier_end: end a token at a barrier: a party that leaves, an abort, or a reset. Times in ms.
--
-- KEYS  as barrier_wait
-- ARGV  1 token
--       2 ttl
--       3 '<any number> <why>', where why is:
--           ''                        the token leaves; the barrier breaks if it has arrived
--           timeout, interrupted, aborted  the barrier breaks
--           reset                     the barrier is no longer broken; those that wait are sent away
--       4 settings (see _settings)
--       5 serial of the request: three digits
--
-- Returns  index + 1 .. serial  the generation of this token has ended before, with this index
--          0 .. serial          the token has ended without passing
--
-- The token is stored as ended, so that neither this request nor an earlier one has an effect later.
-- ZREM comes first: a server without memory refuses ZADD only to a script that has not written yet.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, serial = ARGV[1], tonumber(ARGV[2]), ARGV[#ARGV]
local why = string.match(ARGV[3], '%a*$')

call('ZREM', queue, token, '!' .. token)

--:include _barrier

local how = how_ended(token)
if how then
  return (how == broken and '0' or how + 1) .. serial
end
local waiting, mark = parties(), broken_by()
local has_arrived = call('ZREM', lock, token) == 1
if why == 'reset' then
  if mark then
    call('ZREM', lock, mark)
  end
  end_broken(waiting, ttl)
elseif not mark and (has_arrived or (why ~= '' and why ~= 'leave')) then
  break_barrier(waiting, why ~= '' and why ~= 'leave' and why or 'interrupted', token, ttl)
end
set_ended(token, broken)
keep(memory(ttl))
return publish_error or '0' .. serial
