-- A run begins, or goes on after a stop: these weights are in force, at whatever version, and its counts start at 0.
-- A: version, path or '', batch (0: no bound on new rollouts), max_staleness (-1: none), lane, '1' when the weights are still to
--    be moved: no server has them yet, whatever it had; who starts it
unlock()
local policy = key('policy')
if redis.call('HGET', policy, 'version') ~= A[1] then in_force(A[1], A[2]) else redis.call('HSET', policy, 'path', A[2]) end
redis.call('HSET', policy, 'updates', 0, 'popped', 0, 'dropped', 0, 'batch', A[3], 'max_staleness', A[4], 'lane', A[5],
  'run_owner', A[7])
if A[6] == '1' then
  for _, id in ipairs(redis.call('ZRANGE', key('backends'), 0, -1)) do redis.call('HSET', key('backend', id), 'version', '') end
end
-- What is in the line already counts as begun, by whole groups (admits).
if tonumber(A[3]) > 0 and tonumber(A[4]) >= 0 then
  for _, id in ipairs(redis.call('SMEMBERS', key('started', A[5]))) do begin_group(id, A[5]) end
end
ring_init(64)
return 'OK'
