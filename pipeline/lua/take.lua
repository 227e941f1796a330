-- The trainer has it: forget the rollout, leave a tombstone. A: tombstone's life s, then (id, token)...
-- -> per id OK | AGAIN | STALE
unlock()
local out = {}
for i = 2, #A, 2 do
  local id, token = A[i], A[i + 1]
  local h, gone = key('r', id), key('gone', id)
  local v = redis.call('HMGET', h, 'token', 'group', 'payload', 'owner', 'stage')
  if v[1] == token and v[5] == 'done' then
    release(id, h, 'done', v[4])
    redis.call('SET', gone, token, 'EX', A[1])
    redis.call('UNLINK', h, key('a', id))
    if v[3] and v[3] ~= '' then redis.call('UNLINK', key('p', id, v[3])) end
    redis.call('HINCRBY', key('counts'), 'acked', 1)
    redis.call('HINCRBY', key('counts'), 'live', -1)
    local group = key('g', v[2])
    redis.call('SREM', key('m', v[2]), id)
    if redis.call('HINCRBY', group, 'left', -1) <= 0 then
      local letters = redis.call('HGET', group, 'letters')
      if letters then redis.call('EXPIRE', key('t', v[2]), letters) else redis.call('UNLINK', key('t', v[2])) end
      redis.call('ZREM', key('groups', redis.call('HGET', group, 'lane')), v[2])
      redis.call('UNLINK', group, key('m', v[2]))
    else -- its other members may be popped as a group
      local g = redis.call('HMGET', group, 'done', 'samples', 'lane', 'order')
      if g[1] == g[2] then redis.call('ZADD', key('groups', g[3]), g[4], v[2]) end
    end
    out[#out + 1] = 'OK'
  elseif not v[1] and redis.call('GET', gone) == token then
    out[#out + 1] = 'AGAIN'
  else
    out[#out + 1] = 'STALE'
  end
end
return out
