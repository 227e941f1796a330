-- A consumer gives popped rollouts back before their lease ends. A: (id, token)... -> how many went back
unlock()
local count = 0
for i = 1, #A, 2 do
  local id, h = A[i], key('r', A[i])
  local v = redis.call('HMGET', h, 'token', 'lane', 'order', 'group', 'owner', 'stage')
  if v[1] == A[i + 1] and v[6] == 'done' then
    release(id, h, 'done', v[5])
    redis.call('HSET', h, 'state', 'ready', 'token', '', 'since', whole(now))
    redis.call('ZADD', key('ready', 'done', v[2]), v[3], id)
    poppable(v[4], v[2], v[3])
    ring(key('bell', 'done', v[2]))
    count = count + 1
  end
end
return count
