-- A part of most scripts: the settings of a lock that few locks have. Needs: settings.
--
-- '' or '<lock delay, ms> <order> <owner>'. The order is 'fair' (first come, first served), 'barge'
-- (whoever asks while it is free), or 'forever' (fair, and held without expiry). The owner is '' or
-- what the tokens of its holds end with.

local delay, order, owner = 0, 'fair', ''
if settings ~= '' then
  delay, order, owner = string.match(settings, '^(%d+) (%a+) ?(.*)$')
  delay = tonumber(delay)
end
