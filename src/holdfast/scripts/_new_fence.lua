-- A part of scripts that may have to grant. Needs: call, ttl.

local function new_fence()
  local fence
  --:include _fence
  return fence
end
