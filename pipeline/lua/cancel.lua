-- Cancel rollouts. A: reason, letters' life s, then ids...
-- -> per id REMOVED (it waited; its record is in [done]) | ASKED (somebody holds it; its doorbell rang) | DONE | NONE
unlock()
local out = {}
for i = 3, #A do
  local id, h = A[i], key('r', A[i])
  local v = redis.call('HMGET', h, 'stage', 'state', 'lane', 'owner')
  if not v[1] then
    out[#out + 1] = 'NONE'
  elseif v[1] == 'done' then
    out[#out + 1] = 'DONE'
  elseif v[2] == 'leased' then
    redis.call('HSETNX', h, 'cancel', A[1])
    ring_worker(v[4])
    out[#out + 1] = 'ASKED'
  else
    no_longer_waits(id, h, v[1], v[3])
    finish(id, h, 'cancelled', 'cancelled', A[1], v[1], A[2])
    out[#out + 1] = 'REMOVED'
  end
end
return out
