-- Included by scripts on a lock that may have an owner: its holds. All times are in ms.
-- Needs: call, lock, and what _settings defines.
--
-- The lock's key contains the token of the owner's first hold. When a second hold joins, all holds
-- are stored in KEYS[4], each with its expiry as score, beside a marker with the fence of their
-- grant. Holds of an earlier grant are void, even if the lock was granted to the same token again.
-- They are a set, and not a count in the lock's key, so that a retry does not count twice.

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A token of another lock library may be any text, and end in the same way.
local function is_same_owner(holder)
  return owner ~= '' and holder and string.sub(holder, 1, 4) == 'hf1:'
    and string.sub(holder, -#owner - 1) == ':' .. owner
end

local function grant_marker()
  return '=' .. (call('GET', KEYS[2]) or '')
end

-- The valid holds with their expiry, and the latest expiry. Returns nil while there is a single
-- hold, whose token is in the lock's key.
local function holds_of(now)
  local found = call('ZRANGE', KEYS[4], '(' .. now, '+inf', 'BYSCORE', 'WITHSCORES')
  local holds, latest = {}
  for index = 1, #found, 2 do
    holds[found[index]] = tonumber(found[index + 1])
    if string.byte(found[index]) ~= 61 then
      latest = holds[found[index]]  -- ZRANGE returns them in ascending order
    end
  end
  if holds[grant_marker()] then
    return holds, latest
  end
end

-- Whether `token` is a valid hold of the lock.
local function has_hold(holder, token)
  local holds = is_same_owner(holder) and holds_of(now_ms())
  if holds then
    return holds[token] ~= nil
  end
  return holder == token
end

-- Extends the hold `token`, and the lock, to at least `ttl` from now; `left` is the lock's PTTL.
local function keep_hold(holder, token, left, ttl)
  left = left - delay
  call('PEXPIRE', lock, math.max(left, ttl) + delay)
  if is_same_owner(holder) then
    local now = now_ms()
    local holds = holds_of(now)
    if not holds and holder ~= token then
      call('DEL', KEYS[4])
      call('ZADD', KEYS[4], '+inf', grant_marker(), now + left, holder)
      holds = {}
    end
    if holds then
      call('ZADD', KEYS[4], math.max(holds[token] or 0, now + ttl), token)
      call('PEXPIRE', KEYS[4], math.max(left, ttl))
    end
  end
end

-- Ends the hold `token`. Returns true if it was the last one; otherwise false and the lock's new
-- PTTL, which is that of the longest remaining hold.
local function end_hold(holder, token)
  local now = is_same_owner(holder) and now_ms()
  if not now or not holds_of(now) then
    return true
  end
  call('ZREM', KEYS[4], token)
  local _, latest = holds_of(now)
  if latest then
    call('PEXPIRE', lock, latest - now + delay)
    return false, latest - now + delay
  end
  return true
end
