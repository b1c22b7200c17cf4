-- release_shared: end the token's lease, and grant its permits to waiters. Times in ms.
--
-- It also ends an attempt to acquire, as release does.
--
-- KEYS  1 holders (see _holders)
--       2 fence counter
--       3 queue
-- ARGV  as release
--
-- Returns  1 .. serial  the token had permits, and has none any more
--          0 .. serial  the token had no permits
--          {serial}     as 0; the key of the holders does not exist, and no tombstone shows an eviction
--          {1 or 0, message, serial}  as the first two, and a waiter of the same client was granted
--              permits (see _notify); not with a tombstone, because the reply may not be read then
--
-- The permits of another holder cannot be released: only those of this token are. ZREM comes first:
-- a server without memory refuses ZADD only to a script that has not written yet.

local call = redis.call
local lock, queue = KEYS[1], KEYS[3]
local token, ttl, serial = ARGV[1], tonumber(ARGV[2]), ARGV[#ARGV]
local tombstone, settings = '0', ''
if #ARGV == 5 then
  tombstone, settings = ARGV[3], ARGV[4]
end

local was_first = call('ZRANGE', queue, 0, 0)[1]
local waited = call('ZREM', queue, token, '!' .. token) > 0
was_first = waited and (was_first == token or was_first == '!' .. token)

--:include _holders
--:include _released
local tombstone_ms, mode = string.match(tombstone, '^(%d+) ?(%a*)$')
local seen = #ARGV == 3 or mode == 'seen'
local expiry, after_loss = expiry_of(token)
local was_held = expiry and mode ~= 'leave'
if was_held and (mode == 'lost' or (after_loss and not seen)) then
  end_unreleased(token)
elseif was_held then
  call('ZREM', lock, token)
  if call('EXISTS', lock) == 0 then
    mark_released(true)
  end
end
if tombstone == '0' and was_held and call('EXISTS', queue) == 0 then
  return '1' .. serial
end

-- With a tombstone, or a mode other than 'seen', the client may not read the reply.
local quiet = tombstone ~= '0' and tombstone ~= '0 seen'
--:include _settings
--:include _quarantine
--:include _fence
--:include _hand_out
--:include _tombstone

local missing = false
if not was_held and call('EXISTS', lock) == 0 then
  missing = not call('ZADD', queue, 'XX', 'INCR', 0, '+' .. token)  -- has it a tombstone?
end
local used, holder, left = usage()
local known = math.min(left or math.huge, was_held and expiry - now or math.huge)
local _, pushed = hand_out(used, known, was_first)
if waited and holder and not pushed then
  -- The leaving waiter may be the backup that was to request when a window is over (see release).
  local first = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
  if first and left <= window then
    local _, client = parse_waiter(holder)
    local _, watching = parse_waiter(first)
    notify_backup(client, watching, left + window)
  end
end
if tombstone_ms ~= '0' then
  add_tombstone(token, tonumber(tombstone_ms))
end
if publish_error then
  return publish_error
end
if reply_grant then
  return {was_held and 1 or 0, reply_grant, serial}
end
if missing then
  return {serial}
end
return (was_held and '1' or '0') .. serial
