-- Take a rollout's sandbox away: its host discards it, and whoever works in it finds it gone and goes back to INIT.
-- A: ids... -> per id 1, or 0 where it names no sandbox
unlock()
local out = {}
for i = 1, #A do
  local h = key('r', A[i])
  out[#out + 1] = redis.call('HEXISTS', h, 'sandbox')
  leave_sandbox(h)
end
return out
