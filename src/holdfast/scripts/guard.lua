-- guard: start a quarantine if this server was promoted, or may have lost data. Times in ms.
--
-- In a quarantine the server grants no lock, until every lease that another primary, or this server
-- before its restart, may have granted has ended. Clients run guard on each new connection.
--
-- KEYS  1 restart marker: '<marker> <longest ttl>', without expiry
--       2 quarantine: '<longest ttl>', expires when the quarantine ends
-- ARGV  1 marker of this server, which changes with each promotion and each restart
--       2 longest ttl that the caller's locks may have
--       3 how long a replaced primary may still accept writes
--       4 uptime of this server, or 0 if it may have replaced another one
--       5 '1' if a restart loses no data (append-only file, fsync always)
--       6 '1' if it was a replica since it started
--       7 serial of the request: three digits
--
-- Returns  time left of the quarantine .. serial
--
-- The longest ttl of all clients counts. It is stored with the marker, which is replicated: so the
-- next primary knows about leases of clients with other settings.

local call = redis.call
local marker, longest, overlap, uptime = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local durable, was_replica, serial = ARGV[5] == '1', ARGV[6] == '1', ARGV[7]

local known_marker, known_longest = string.match(call('GET', KEYS[1]) or '', '^(%S+) (%d+)$')
longest = math.max(longest, tonumber(known_longest or 0))
if known_marker ~= marker then
  local quarantine_ms = longest + overlap
  if not was_replica and not known_marker then
    -- First use, or a start without data: leases can only be older than this server's start.
    quarantine_ms = quarantine_ms - uptime
  elseif not was_replica and durable then
    quarantine_ms = 0
  end
  if quarantine_ms > 0 then
    call('SET', KEYS[2], longest, 'PX', quarantine_ms)
  end
end
if known_marker ~= marker or longest > tonumber(known_longest) then
  call('SET', KEYS[1], marker .. ' ' .. longest)
end
return math.max(0, call('PTTL', KEYS[2])) .. serial
