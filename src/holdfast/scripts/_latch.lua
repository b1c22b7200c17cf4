-- Included by scripts on a latch: its state. Times in ms. Needs: call, lock.
--
-- A latch is a sorted set. Its first member is '=' and the count with which it was made, with the
-- score 0. The others are the ids that were counted, each with its number: 1, 2, 3, and so on. So an
-- id counts once, and the latch is open when the last number is the count. The key expires some time
-- after the last use.

-- The count with which the latch was made, nil if it does not exist; and how many were counted.
local function read_latch()
  local first = call('ZRANGE', lock, 0, 0)[1]
  local newest = call('ZRANGE', lock, 0, 0, 'REV', 'WITHSCORES')
  return first and tonumber(string.sub(first, 2)), tonumber(newest[2] or 0)
end

-- Makes the latch unless it exists, and keeps it for at least `keep` from now.
local function keep_latch(stored, count, keep)
  if not stored then
    call('ZADD', lock, 0, '=' .. count)
  end
  call('PEXPIRE', lock, math.max(call('PTTL', lock), keep))
end
