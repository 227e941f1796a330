-- Renew a pause. A: owner, life ms -> 1, or 0 when it is not this owner's any more
unlock()
if pauser() ~= A[1] then return 0 end
redis.call('HSET', key('policy'), 'pause_until', whole(now + A[2]))
return 1
