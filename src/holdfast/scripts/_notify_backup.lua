-- Notifies a backup to request the lock in `px` ms: one window after the first waiter.
--
-- Invariant: a grant that is not used delays the queue by windows, not by the ttl of the last
-- holder.
-- New holder (`client`), first waiter (`watching`): both are killed or stopped within the window.
-- Without a backup, all other waiters wait for the end of the previous lease.
--
-- The backup is of a third client, and one of the last waiters: neighbours are often on the same
-- machine, and stop together. hand_over notifies one unless the key exists and has at most a window
-- left. Waiters that joined during that rest know from the reply that the lease ends soon, and
-- request the lock then. The backup of the last long lease requests it as well, until it holds the
-- lock.
local function notify_backup(client, watching, px)
  local waiters = call('ZRANGE', queue, '(1e16', '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 8)
  for _, waiter in ipairs(waiters) do
    local waiter_token, other = parse_waiter(waiter)
    if other ~= client and other ~= watching then
      if waiter_token == token or notify(waiter, 'W', 0, px) or publish_error then
        return
      end
      call('ZREM', queue, waiter)
    end
  end
end

-- Notifies the first waiter to request the lock in `px` ms, and one waiter of another client a
-- window later, because the first one may be dead. Without the second message, the waiters behind
-- the first know only the old end of the lease, which may be later.
local function notify_two(kind, px)
  local first = notify_first(kind, px)
  if first then
    local _, client = parse_waiter(first)
    notify_backup(client, client, px + window)
  end
end
