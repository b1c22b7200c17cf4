-- How long a hand-over is valid until the new holder sends its first request. A stopped process
-- delays the waiters behind it by this time. A process that was only slow, and missed its window,
-- keeps its place in the queue by its ticket, and is granted the lock next.
local window = math.max(250, math.min(ttl, 1000))

-- Notifies the first waiter in the queue, and returns it, or nil if the queue is empty. A waiter
-- whose client is not subscribed is removed, and the next one is tried. The waiter that runs this
-- script is not notified: it receives the same information as its reply.
local function notify_first(kind, px)
  while true do
    local waiter = call('ZRANGE', queue, '-inf', '(1e16', 'BYSCORE', 'LIMIT', 0, 1)[1]
    if not waiter or parse_waiter(waiter) == token or notify(waiter, kind, 0, px) or publish_error then
      return waiter
    end
    call('ZREM', queue, waiter)
  end
end
