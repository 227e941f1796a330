-- A RUN worker's look at the policy, once a second: its own share of the load goes in, everything comes back.
-- A: worker or '' (a look without a share), its share (JSON) or '', ms for which a share holds, the newest pause that it knows
-- -> {now, policy (flat), {{id, end of lease ms or 'inf', (flat)}...}, {worker, newest pause that it knows, share...}}
-- What is over goes: leases of servers, shares of workers that are silent, the pause of a trainer that is.
unlock()
local all, loads, policy = key('backends'), key('loads'), key('policy')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', whole(now))) do
  redis.call('DEL', key('backend', id))
  redis.call('ZREM', all, id)
end
pauser()
if A[1] ~= '' then
  if A[2] ~= '' then redis.call('HSET', loads, A[1], whole(now + A[3]) .. ' ' .. A[4] .. ' ' .. A[2]) else redis.call('HDEL', loads, A[1]) end
end
local shares, old = {}, redis.call('HGETALL', loads)
for i = 1, #old, 2 do
  local ends, seen, share = string.match(old[i + 1], '^(%d+) (%d+) (.*)$')
  if tonumber(ends) <= now then
    redis.call('HDEL', loads, old[i])
  elseif old[i] ~= A[1] then
    shares[#shares + 1] = old[i]
    shares[#shares + 1] = seen
    shares[#shares + 1] = share
  end
end
local backends, ids = {}, redis.call('ZRANGE', all, 0, -1, 'WITHSCORES')
for i = 1, #ids, 2 do
  backends[#backends + 1] = { ids[i], ids[i + 1], redis.call('HGETALL', key('backend', ids[i])) }
end
return { whole(now), redis.call('HGETALL', policy), backends, shares }
