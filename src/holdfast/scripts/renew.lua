-- renew: keep the lock for at least ttl more, if it is still this token's.
--
-- KEYS  1 lock  2 fence counter
-- ARGV  1 token  2 ttl (ms)  3 life of the fence counter (ms)  4 serial of the request
--
-- Returns  1 .. serial  kept
--          0 .. serial  it was not ours, and nothing was changed
--
-- Expiry only grows, so that a request that arrives late cannot shorten what a newer one asked for.
-- PEXPIRE needs no memory: this works on a server that is full.

local ttl = tonumber(ARGV[2])
if not ttl or ttl < 1 then
  return redis.error_reply('ERR holdfast: ttl must be at least 1 ms')
end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return '0' .. ARGV[4]
end
redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ttl))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return '1' .. ARGV[4]
