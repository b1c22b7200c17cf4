-- guard: find out whether this server has taken another's place, or lost what it knew, and if so have
-- nobody get a lock until all that was granted before is over. Asked on each new connection.
--
-- KEYS  1 home: '<mark> <longest ttl, ms>', for ever  2 quarantine: '<longest ttl, ms>', while it lasts
-- ARGV  1 mark of this server, another one after each promotion and each restart
--       2 longest ttl that the caller's locks may have (ms)  3 how long a server that was replaced may
--       still take writes (ms)  4 how long this one has run (ms), or 0 if it may have replaced another
--       5 '1' if a restart loses nothing, unless with the disk
--       6 '1' if it was a replica since it started  7 serial of the request
--
-- Returns  left of the quarantine (ms) .. serial
--
-- The longest ttl ever given counts: home goes to the replicas with all else, so that who guards the
-- next primary knows of leases of clients with other settings.

local call = redis.call
local mark, longest, overlap, uptime = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local durable, was_replica, serial = ARGV[5] == '1', ARGV[6] == '1', ARGV[7]

local known, before = string.match(call('GET', KEYS[1]) or '', '^(%S+) (%d+)$')
longest = math.max(longest, tonumber(before or 0))
if known ~= mark then
  local lasts = longest + overlap
  if not was_replica and not known then
    lasts = lasts - uptime  -- its first use, or a start with nothing; not, if it has run for long
  elseif not was_replica and durable then
    lasts = 0
  end
  if lasts > 0 then
    call('SET', KEYS[2], longest, 'PX', lasts)
  end
end
if known ~= mark or longest > tonumber(before) then
  call('SET', KEYS[1], mark .. ' ' .. longest)
end
return math.max(0, call('PTTL', KEYS[2])) .. serial
