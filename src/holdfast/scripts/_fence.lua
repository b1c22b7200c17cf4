-- Included by scripts that may grant the lock: `new_fence` (µs). Needs: call, ttl (ms).

-- Writes the lock's next fence and returns it. Callers write the fence before the lock: a script that
-- fails in between leaves no lock held. `after_loss`: see _next_fence.
local function new_fence(after_loss)
  local fence
  --:include _next_fence
  return fence
end

-- Extends the life of the counter, with a renewal for example. It is never shortened.
local function keep_counter()
  call('PEXPIRE', KEYS[2], math.max(call('PTTL', KEYS[2]), 3600000, 2 * ttl))
end
