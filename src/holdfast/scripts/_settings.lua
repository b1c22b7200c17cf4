-- Included by most scripts: the lock's settings that differ from the default. All times are in ms.
-- Needs: settings, which is '' or '<lock delay> <order>[+guard] <owner>'.
--
-- delay    the lock's key stays that much longer than its lease: no client is granted the lock in
--          this time, not even its last holder
-- order    'fair': waiters are granted the lock in the order they joined the queue
--          'barge': the first client that requests the free lock gets it
--          'forever': as 'fair', and the lock does not expire
-- guarded  '+guard' for servers that may replace another one (see guard)
-- owner    the end of the tokens of the owner's holds, or ''

local delay, order, guarded, owner = 0, 'fair', '', ''
if settings ~= '' then
  delay, order, guarded, owner = string.match(settings, '^(%d+) (%a+)(%S*) ?(.*)$')
  delay = tonumber(delay)
end

-- Whether the lease has ended: the lock's key does not exist, or only its lock delay is left.
-- `left` is the key's PTTL.
local function is_over(left)
  return left ~= -1 and left <= delay
end
