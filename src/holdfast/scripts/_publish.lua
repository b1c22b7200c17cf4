-- Included by scripts that publish to a client's channel: `publish`.
--
-- Each client has its own channel. If the client's name begins with '~', it is connected to a
-- cluster, and the channel is a sharded one, in the slot of the lock. SPUBLISH counts only
-- subscribers on this node. A replica forwards the message too, even one that was the primary until
-- now. So each message starts with the id of this node, and a client rejects messages that another
-- node forwards.
--
-- Returns the number of receivers, or the error reply if the server refuses to publish.

local function publish(client, message)
  if string.byte(client) ~= 126 then
    return redis.pcall('PUBLISH', 'holdfast:push:' .. client, message)
  end
  local node = redis.pcall('CLUSTER', 'MYID')
  if type(node) == 'table' then
    return node
  end
  local channel = 'holdfast:push:' .. client .. ':' .. string.match(KEYS[2], '{[^}]+}')
  return redis.pcall('SPUBLISH', channel, node .. message)
end
