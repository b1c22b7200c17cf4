-- A part of scripts that speak to clients.
--
-- A client has a channel of its own. If its name begins with a ~ it listens in this cluster, on a
-- channel of the lock's slot. It is counted only if it does so on this node; but a replica passes the
-- message on too, also one that was the primary until now. So the message begins with the name of this
-- node: nobody is to believe what came by way of another.
--
-- Returns the number of listeners, or what the server said when it did not let us.

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
