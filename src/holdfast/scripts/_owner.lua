-- A part of scripts about a lock that may have an owner. Needs: call, lock, settings' names.
--
-- The lock's key holds the token of the owner's first hold. Once a second one joins, all are kept in
-- KEYS[4], each with the moment it expires at, beside a mark with the fence of the grant that they belong
-- to. Holds of an earlier grant are void, even if the same token was granted the lock again.

local function milliseconds()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function is_owners(holder)
  return owner ~= '' and holder and string.sub(holder, -#owner) == owner
end

local function mark()
  return '=' .. (call('GET', KEYS[2]) or '')
end

-- The holds that keep the lock, with the moments they expire at, and the latest of these; nothing
-- while there is one only, whose token is in the lock's key.
local function holds_of(time)
  local found = call('ZRANGE', KEYS[4], '(' .. time, '+inf', 'BYSCORE', 'WITHSCORES')
  local holds, latest = {}
  for index = 1, #found, 2 do
    holds[found[index]] = tonumber(found[index + 1])
    if string.byte(found[index]) ~= 61 then
      latest = holds[found[index]]  -- they are in order
    end
  end
  if holds[mark()] then
    return holds, latest
  end
end

-- Whether `token` is one of the holds that keep the lock.
local function has_hold(holder, token)
  local holds = is_owners(holder) and holds_of(milliseconds())
  if holds then
    return holds[token] ~= nil
  end
  return holder == token
end

-- Keeps the hold `token` for at least `ttl` more, and the lock, which has `left`, with it.
local function keep_hold(holder, token, left, ttl)
  left = left - delay
  call('PEXPIRE', lock, math.max(left, ttl) + delay)
  if is_owners(holder) then
    local time = milliseconds()
    local holds = holds_of(time)
    if not holds and holder ~= token then
      call('DEL', KEYS[4])
      call('ZADD', KEYS[4], '+inf', mark(), time + left, holder)
      holds = {}
    end
    if holds then
      call('ZADD', KEYS[4], math.max(holds[token] or 0, time + ttl), token)
      call('PEXPIRE', KEYS[4], math.max(left, ttl))
    end
  end
end

-- Ends the hold `token`; says whether it was the last one, and else what is left of the lock. A lock
-- that others keep is theirs for as long as the longest of them asked for.
local function end_hold(holder, token)
  local time = is_owners(holder) and milliseconds()
  if not time or not holds_of(time) then
    return true
  end
  call('ZREM', KEYS[4], token)
  local _, latest = holds_of(time)
  if latest then
    call('PEXPIRE', lock, latest - time + delay)
    return false, latest - time + delay
  end
  return true
end
