-- The run is over: it bounds nothing any more. What was sampled and which weights are in force stays. A: who started it, or ''
-- for whoever did -> 1, or 0 where there is no run of that one
unlock()
local owner = redis.call('HGET', key('policy'), 'run_owner')
if not owner or owner == '' or (A[1] ~= '' and A[1] ~= owner) then return 0 end
redis.call('HSET', key('policy'), 'run_owner', '', 'batch', 0)
ring_init(64)
return 1
