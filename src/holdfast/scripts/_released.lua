-- Included by scripts that end leases: `mark_released`. Needs: call.

-- Notes in the fence counter that the last lease was released, so that the next one is not `after_loss`
-- (see _fence). The counter keeps its expiry; one that is gone stays gone. Its last digit becomes odd:
-- 0 becomes 1, and 2 becomes 3. Without `seen` a 2 stays, so the next lease is `after_loss` too.
--
-- Invariant: a loss is reported by a lease that a user has had (`seen`).
-- Attempt: it is granted the lock after a loss, and is cancelled. It releases the lock.
-- Next attempt: it is granted the lock.
-- Without `seen`, that release would hide the loss from the next attempt.
local function mark_released(seen)
  local digit = string.sub(call('GET', KEYS[2]) or '', -1)
  if digit == '0' or (seen and digit == '2') then
    call('INCRBY', KEYS[2], '1')
  end
end
