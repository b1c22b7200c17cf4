-- Included by scripts that grant or extend nothing in a quarantine (see guard): `quarantine` (ms).
-- Needs: call, and what _settings defines.

-- For how much longer this server grants no lock; nil outside a quarantine.
local function quarantine()
  local left = guarded ~= '' and call('PTTL', 'holdfast:quarantine')
  return left and left > 0 and left or nil
end
