-- Write fields of a policy server that is registered. A: id, (field, value)... -> 1, or 0 when it is not
unlock()
if redis.call('EXISTS', key('backend', A[1])) == 0 then return 0 end
redis.call('HSET', key('backend', A[1]), unpack(A, 2))
return 1
