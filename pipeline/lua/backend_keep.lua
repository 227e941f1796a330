-- Renew the lease of a policy server. A: id, owner, life ms -> 1, or 0 when it is not registered by this owner any more
unlock()
if redis.call('HGET', key('backend', A[1]), 'owner') ~= A[2] then return 0 end
redis.call('ZADD', key('backends'), whole(now + A[3]), A[1])
return 1
