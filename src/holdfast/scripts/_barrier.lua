-- Included by scripts on a barrier: its parties, and the end of a generation. Times in ms. Needs: call,
-- lock, queue, token.
--
-- A barrier is a sorted set. Its members are:
--   the token of a party that waits: the score is when its lease expires, by the server's clock
--   the token of a party whose generation has ended: the score is -(s * 1000000 + how), where s is the
--     second in which it ended, and how is the party's index, or 999999 if the barrier was broken
--   '<reason> <token>': the barrier is broken, why and by which party; the score is 1e16
--
-- Ended tokens are kept for some time. So a retry, or a party that is notified late, finds how its own
-- generation ended, whatever has happened since; and a request that arrives late changes nothing.

local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local broken, broken_for = 999999, 86400000

-- Notifies all waiters, and removes them from the queue.
--:include _notify_all

-- How the generation of a token has ended: with its index, or broken; nil if it has not.
local function how_ended(its_token)
  local score = tonumber(call('ZADD', lock, 'XX', 'INCR', 0, its_token) or 0)
  return score < 0 and -score % 1000000 or nil
end

-- The parties that wait, each followed by when its lease expires; the first to expire comes first.
local function parties()
  return call('ZRANGE', lock, 0, '(1e16', 'BYSCORE', 'WITHSCORES')
end

-- '<reason> <token>' if the barrier is broken, otherwise nil.
local function broken_by()
  return call('ZRANGE', lock, '1e16', '+inf', 'BYSCORE')[1]
end

local function set_ended(its_token, how)
  call('ZADD', lock, string.format('-%.0f', time[1] * 1000000 + how), its_token)
end

-- Keeps the key for at least `px`.
local function keep(px)
  call('PEXPIRE', lock, math.max(call('PTTL', lock), px))
end

-- Ended tokens are kept for that long: for longer than their parties retry, or a request is under way.
local function memory(ttl)
  return math.max(120000, 2 * ttl)
end

-- Forgets tokens that have ended before that.
local function forget_old(ttl)
  local before = string.format('(-%.0f', (time[1] - memory(ttl) / 1000) * 1000000)
  repeat
    local old = call('ZRANGE', lock, before, '(0', 'BYSCORE', 'LIMIT', 0, 1000)
    if #old > 0 then
      call('ZREM', lock, unpack(old))
    end
  until #old < 1000
end

-- Ends the generation of these parties as broken.
local function end_broken(waiting, ttl)
  for index = 1, #waiting, 2 do
    set_ended(waiting[index], broken)
  end
  forget_old(ttl)
  keep(memory(ttl))
  notify_all()
end

-- Breaks the barrier, until it is reset, or for a day.
local function break_barrier(waiting, reason, by, ttl)
  local mark = reason .. ' ' .. by
  call('ZADD', lock, 1e16, mark)
  end_broken(waiting, ttl)
  keep(broken_for)
  return mark
end
