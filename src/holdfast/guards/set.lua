-- set: write a string. Times in ms.
--
-- KEYS  1 key
-- ARGV  1 value
--       2 expiry; '' for none
--
-- Returns  'OK'

if ARGV[2] == '' then
  return redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
