-- End an attempt without a result; refused unless the token is current.
-- A: stage, id, token, mode (attempt: counts against attempts | loss: against losses | fatal: ends it | back: counts nothing),
--    delay ms, to ('', 'init' or 'place': INIT, and it needs a place), max attempts, max losses, kind, why, attempt record, worked ms, letters' life s, log, host, exit code
-- -> {READY | DELAYED | FAILED | CANCELLED | AGAIN | STALE, attempts, losses}
local stage, id, token, mode = A[1], A[2], A[3], A[4]
local h = key('r', id)
local v = redis.call('HMGET', h, 'token', 'spent:' .. stage, 'owner')
if v[1] ~= token then
  if v[2] == token then return { 'AGAIN', 0, 0 } end
  return { 'STALE', 0, 0 }
end
unlock()
release(id, h, stage, v[3])
redis.call('HSET', h, 'spent:' .. stage, token)
redis.call('HINCRBY', h, 'worked', A[12])
remember(id, A[11])
if mode == 'loss' then redis.call('HINCRBY', h, 'losses', 1) end
if mode == 'loss' or mode == 'back' then redis.call('HINCRBY', h, 'attempts:' .. stage, -1) end
local attempts = tonumber(redis.call('HGET', h, 'attempts:' .. stage))
local losses = tonumber(redis.call('HGET', h, 'losses'))
redis.call('HINCRBY', key('counts'), mode .. ':' .. stage, 1)
if stop_asked(id, h, stage, A[13]) then return { 'CANCELLED', attempts, losses } end
local over = mode == 'fatal' or (mode == 'attempt' and attempts >= tonumber(A[7])) or (mode == 'loss' and losses >= tonumber(A[8]))
if over then
  redis.call('HSET', h, 'log', A[14], 'host', A[15], 'exit', A[16])
  finish(id, h, 'failed', A[9], A[10], stage, A[13])
  return { 'FAILED', attempts, losses }
end
local to = A[6] ~= '' and A[6] or back(h, stage)
if to == 'place' then
  redis.call('HSET', h, 'place', '1')
  to = 'init'
end
if tonumber(A[5]) > 0 then
  to_delayed(id, h, to, tonumber(A[5]))
  return { 'DELAYED', attempts, losses }
end
to_ready(id, h, to)
return { 'READY', attempts, losses }
