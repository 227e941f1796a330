-- Finish a stage and enter the next, in one step; refused unless the token is current.
-- A: stage, id, token, next stage, envelope, payload token ('' keeps the one there), payload (when it is small enough to come
--    along), restart, attempt record, worked ms, result (of the last stage), letters' life s, sandbox ('' none, '-' unchanged)
-- -> OK | AGAIN (this very commit was accepted before) | STALE | NOPAYLOAD | CANCELLED
local stage, id, token = A[1], A[2], A[3]
local h = key('r', id)
local v = redis.call('HMGET', h, 'token', 'spent:' .. stage, 'owner', 'payload')
if v[1] ~= token then
  if v[2] == token then return 'AGAIN' end
  return 'STALE'
end
unlock()
if A[6] ~= '' then
  local p = key('p', id, A[6])
  if A[7] ~= '' then redis.call('SET', p, A[7]) end
  if redis.call('EXISTS', p) == 0 then return 'NOPAYLOAD' end
end
release(id, h, stage, v[3])
redis.call('HSET', h, 'spent:' .. stage, token)
redis.call('HINCRBY', h, 'worked', A[10])
remember(id, A[9])
if stop_asked(id, h, stage, A[12]) then
  if A[6] ~= '' then forget(key('p', id, A[6])) end
  return 'CANCELLED'
end
if A[6] ~= '' then
  redis.call('PERSIST', key('p', id, A[6]))
  if v[4] and v[4] ~= '' and v[4] ~= A[6] then forget(key('p', id, v[4])) end
  redis.call('HSET', h, 'payload', A[6])
end
redis.call('HSET', h, 'env', A[5], 'attempts:' .. stage, 0)
if A[8] ~= '' then redis.call('HSET', h, 'restart', A[8]) end
if A[13] == '' then leave_sandbox(h) elseif A[13] ~= '-' then redis.call('HSET', h, 'sandbox', A[13]) end
redis.call('HINCRBY', key('counts'), 'committed:' .. stage, 1)
if A[4] == 'done' then
  redis.call('HSET', h, 'result', A[11])
  finish(id, h, 'scored', '', '', stage, A[12])
else
  to_ready(id, h, A[4])
end
return 'OK'
