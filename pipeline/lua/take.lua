-- The trainer has it: forget the rollout, leave a tombstone. A: tombstone's life s, 'ack' or 'drop', then (id, token)...
-- -> per id OK | AGAIN | STALE
-- Dropped is what is too stale to train on: it does not count as popped, so that a new one may begin in its place.
unlock()
local out, run_lane = {}, redis.call('HGET', key('policy'), 'lane')

local function leave_run(id, lane, outcome)
  if A[2] == 'drop' then
    not_begun(id, lane)
  else
    redis.call('SREM', key('started', lane), id)
  end
  if outcome ~= 'scored' then return end
  if A[2] == 'drop' then redis.call('HINCRBY', key('counts'), 'dropped', 1) end
  if lane == run_lane then redis.call('HINCRBY', key('policy'), A[2] == 'drop' and 'dropped' or 'popped', 1) end
end

for i = 3, #A, 2 do
  local id, token = A[i], A[i + 1]
  local h, gone = key('r', id), key('gone', id)
  local v = redis.call('HMGET', h, 'token', 'group', 'payload', 'owner', 'stage', 'lane', 'outcome')
  if v[1] == token and v[5] == 'done' then
    release(id, h, 'done', v[4])
    leave_run(id, v[6], v[7])
    redis.call('SET', gone, token, 'EX', A[1])
    redis.call('UNLINK', h, key('a', id))
    if v[3] and v[3] ~= '' then forget(key('p', id, v[3])) end
    redis.call('HINCRBY', key('counts'), 'acked', 1)
    redis.call('HINCRBY', key('counts'), 'live', -1)
    local group = key('g', v[2])
    redis.call('SREM', key('m', v[2]), id)
    if redis.call('HINCRBY', group, 'left', -1) <= 0 then
      local letters = redis.call('HGET', group, 'letters')
      if letters then redis.call('EXPIRE', key('t', v[2]), letters) else forget(key('t', v[2])) end
      redis.call('ZREM', key('groups', redis.call('HGET', group, 'lane')), v[2])
      not_spare(group, v[6], math.huge)
      redis.call('ZREM', key('closing'), v[2])
      redis.call('UNLINK', group, key('m', v[2]))
    else -- its other members may be popped as a group
      local g = redis.call('HMGET', group, 'done', 'samples', 'lane', 'order', 'closed', 'rest')
      if g[5] and g[6] then redis.call('HSET', group, 'part', 1) end -- what comes of it from now on is late
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
