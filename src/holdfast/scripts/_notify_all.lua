-- Included by scripts that store what all waiters want: `notify_all`. Needs: call, lock, queue, token.

local delay, quiet = 0, true
--:include _notify

-- Removes all waiters from the queue, and notifies each to send its request, which finds the value. If
-- the server refuses to publish, they stay.
local function notify_all()
  repeat
    local waiters = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1000)
    for _, waiter in ipairs(waiters) do
      notify(waiter, 'A', 0, 0)
    end
    if publish_error then
      return
    end
    if #waiters > 0 then
      call('ZREM', queue, unpack(waiters))
    end
  until #waiters < 1000
end
