-- Renew the leases of a worker or a trainer's client, and say that it lives.
-- A: its name, lease ms, payload life s, about (JSON; '' says nothing), a client's life s (0: a worker), then (stage, id, token)...
-- -> {the line's schema (0: none), then per lease 1 held, 0 lost, or the cancel's reason}
unlock()
local out = { tonumber(redis.call('GET', key('schema')) or 0) }
for i = 6, #A, 3 do
  local stage, id, token = A[i], A[i + 1], A[i + 2]
  local v = redis.call('HMGET', key('r', id), 'token', 'cancel')
  if v[1] ~= token then
    out[#out + 1] = 0
  else
    redis.call('ZADD', key('lease', stage), 'XX', whole(now + A[2]), id)
    redis.call('EXPIRE', key('p', id, token), A[3])
    out[#out + 1] = v[2] or 1
  end
end
redis.call('DEL', key('died', A[1]))
if A[5] ~= '0' then
  redis.call('SET', key('client', A[1]), A[4], 'EX', A[5])
elseif A[4] ~= '' then
  redis.call('HSET', key('workers'), A[1], A[4])
  redis.call('ZADD', key('beats'), whole(now), A[1])
end
return out
