-- Included by scripts that may change the holder of an election: notify its observers (see observe).
-- Needs: before, the token that held the lock before the script. KEYS as campaign, ARGV[1] is a token.
--
-- A retry changes nothing, and notifies no observer.

if redis.call('GET', KEYS[1]) ~= before then
  local call, lock, queue, token = redis.call, KEYS[4], KEYS[4], ARGV[1]
--:include _notify_all
  notify_all()
end
