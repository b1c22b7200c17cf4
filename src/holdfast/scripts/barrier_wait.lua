-- barrier_wait: arrive at a barrier, or renew the lease of a party that waits there. Times in ms, tickets
-- in µs.
--
-- KEYS  1 barrier (see _barrier)
--       2 fence counter, which a barrier does not use
--       3 queue
-- ARGV  1 to 4 as acquire
--       5 how many parties the barrier has
--       6 serial of the request: three digits
--
-- Returns  {'passed', index, serial}          all parties of this generation have arrived
--          {'broken', '<reason> <token>', serial}  the barrier is broken, or was when this party waited;
--                                             '' if it was reset since
--          {'parties', other number, serial}  those that wait have another number; the caller did not
--                                             arrive
--          {first token, left, ticket, place lost, '', serial}  not all have arrived; as a refusal of
--              acquire. `left` is when the first lease expires. The ticket is '0' without a place
--
-- Invariants: no party passes before all parties of its generation have arrived; a generation ends in
-- the same way for all its parties.
-- Last party: its script ends the generation, and stores an index for every token.
-- Other party: it requests again when it is notified, or after a lost reply, maybe when the next generation
-- waits already.
-- Without the stored index it would arrive a second time, in the wrong generation.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, place, size, serial = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[5]), ARGV[6]
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end

--:include _barrier

-- A server without memory refuses ZADD only to a script that has not written yet. So a party that
-- waits can renew its lease there.
if call('EXISTS', lock) == 1 then
  keep(ttl + memory(ttl))
end
local how = how_ended(token)
if how then
  call('ZREM', queue, token, '!' .. token)
  if how == broken then
    return {'broken', broken_by() or '', serial}
  end
  return {'passed', how, serial}
end
local mark, waiting = broken_by(), parties()
if not mark and waiting[1] and tonumber(waiting[2]) < now then
  call('ZREM', queue, token, '!' .. token)
  mark = break_barrier(waiting, 'lost', waiting[1], ttl)
end
if mark then
  -- The caller does not wait. So a second copy of its request must not arrive, even after a reset.
  set_ended(token, broken)
  forget_old(ttl)
  return {'broken', mark, serial}
end
local others = {}
for index = 1, #waiting, 2 do
  if waiting[index] ~= token then
    table.insert(others, waiting[index])
  end
end
local other_size = tonumber(string.match(others[1] or '', '/(%d+)$'))
if other_size and other_size ~= size then
  return {'parties', other_size, serial}
end

if #others + 1 >= size then
  set_ended(token, #others)
  for index, other in ipairs(others) do
    set_ended(other, index - 1)
  end
  forget_old(ttl)
  keep(memory(ttl))
  notify_all()
  return publish_error or {'passed', #others, serial}
end

call('ZADD', lock, 'GT', now + ttl, token)
keep(ttl + memory(ttl))

-- The score of a member of the queue, or nil (see acquire).
local function score(member)
  return call('ZADD', queue, 'XX', 'INCR', 0, member)
end

local last = tonumber(call('ZRANGE', queue, 0, 0, 'REV', 'WITHSCORES')[2])
--:include _join_queue
local ticket, place_lost = '0', 0
if place ~= '' then
  ticket, place_lost = join_queue()
end
local first = parties()
return {first[1], math.max(0, first[2] - now), ticket, place_lost, '', serial}
