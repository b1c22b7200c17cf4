-- A part of scripts that do less in a quarantine (see guard). Needs: call, settings' names.

-- For how much longer no lock is granted here (ms); nil outside a quarantine.
local function quarantine()
  local left = guarded ~= '' and call('PTTL', 'holdfast:quarantine')
  return left and left > 0 and left or nil
end
