-- Lease those of these rollouts that have ended and wait to be popped. A: lease ms, consumer, nonce, newest schema that it reads,
-- ids...
-- -> per rollout got {id, token}. The same request sent again gets the same leases: a token is the nonce and the id.
local refusal = above(A[4])
if refusal then return refusal end
unlock()
local out = {}
for i = 5, #A do
  local id, h, token = A[i], key('r', A[i]), A[3] .. '-' .. A[i]
  local v = redis.call('HMGET', h, 'stage', 'state', 'token', 'lane', 'group')
  if v[1] == 'done' and v[2] == 'ready' then
    redis.call('ZREM', key('ready', 'done', v[4]), id)
    redis.call('ZREM', key('groups', v[4]), v[5])
    redis.call('HSET', h, 'state', 'leased', 'token', token, 'owner', A[2], 'since', whole(now))
    redis.call('ZADD', key('lease', 'done'), whole(now + A[1]), id)
    redis.call('SADD', key('own', A[2]), id)
    out[#out + 1] = { id, token }
  elseif v[1] == 'done' and v[3] == token then
    out[#out + 1] = { id, token }
  end
end
return out
