-- A part of most scripts: the settings of a lock that few locks have. Needs: settings.
--
-- '' or '<lock delay, ms> <order>[+guard] <owner>'. With a delay the lock's key stays that much longer
-- than its holder may count on: nobody gets it meanwhile, and the holder does not get it back. The order
-- is 'fair' (first come, first served), 'barge' (whoever asks while it is free), or 'forever' (fair,
-- and held without expiry). '+guard' is for servers that may take another's place (see guard). The
-- owner is '' or what the tokens of its holds end with.

local delay, order, guarded, owner = 0, 'fair', '', ''
if settings ~= '' then
  delay, order, guarded, owner = string.match(settings, '^(%d+) (%a+)(%S*) ?(.*)$')
  delay = tonumber(delay)
end

-- Whether the lease is over: the lock's key is gone, or has only the lock delay `left` (its PTTL).
local function is_over(left)
  return left ~= -1 and left <= delay
end
