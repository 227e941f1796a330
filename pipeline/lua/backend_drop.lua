-- Strike a policy server off. A: id, owner or '' (whoever it is) -> 1, or 0 when there was none (of this owner)
if A[2] ~= '' and redis.call('HGET', key('backend', A[1]), 'owner') ~= A[2] then return 0 end
redis.call('DEL', key('backend', A[1]))
return redis.call('ZREM', key('backends'), A[1])
