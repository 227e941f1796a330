-- Give an end to what nothing names any more: payloads that no rollout's hash names, tasks that no group has.
-- A: life s, then ('p', id, token) or ('t', group, '')... -> how many were given one
unlock()
local given = 0
for i = 2, #A, 3 do
  local name, named
  if A[i] == 'p' then
    name, named = key('p', A[i + 1], A[i + 2]), redis.call('HGET', key('r', A[i + 1]), 'payload') == A[i + 2]
  else
    name, named = key('t', A[i + 1]), redis.call('EXISTS', key('g', A[i + 1])) == 1
  end
  if not named and redis.call('TTL', name) == -1 then
    redis.call('EXPIRE', name, A[1])
    given = given + 1
  end
end
return given
