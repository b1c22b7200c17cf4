-- A part of scripts that do less in a quarantine (see guard). Needs: call, settings' names.

-- How much longer nobody gets a lock here (ms).
local function quarantine()
  return guarded == '' and 0 or math.max(0, call('PTTL', 'holdfast:quarantine'))
end
