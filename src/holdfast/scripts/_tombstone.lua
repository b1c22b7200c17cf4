-- Included by scripts that end a token: `add_tombstone` (ms). Needs: call, queue.
--
-- Invariant: a request that arrives after its token was ended does not take the lock.
-- Client: it abandons an acquire without a reply, and sends a release for the token.
-- Server: the release arrives first, and the delayed acquire afterwards.
-- Without the tombstone, the acquire would be granted a lock that no client releases.
--
-- One is written if a request with the token may still arrive: by the release of an acquire that was
-- interrupted, got no reply or was granted too late; by a release in the background; after a loss; for
-- a token that an eviction, an adoption or a downgrade ended; and on a node of a quorum, if another
-- thread releases, or if the lease was restored there. An ordinary release writes none, so that it
-- needs no memory.
--
-- A tombstone is '+' and the token, in the queue behind all waiters. Its score is 1e16 plus the
-- time at which it expires. So the last member of the queue shows whether there are tombstones.

local function add_tombstone(token, tombstone_ms)
  local time = call('TIME')
  local now = 1e16 + time[1] * 1000 + math.floor(time[2] / 1000)
  local expired = call('ZRANGE', queue, '1e16', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, 100)
  if #expired > 0 then
    call('ZREM', queue, unpack(expired))
  end
  redis.pcall('ZADD', queue, string.format('%.0f', now + tombstone_ms), '+' .. token)
  redis.pcall('PEXPIRE', queue, math.max(call('PTTL', queue), tombstone_ms))
end
