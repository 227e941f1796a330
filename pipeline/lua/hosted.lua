-- Read only: which of these sandboxes are still wanted. A: (id, the sandbox's text, token of the INIT attempt that makes it)...
-- -> per sandbox 1 (its rollout names exactly this one, or that attempt still holds its lease), or 0
local out = {}
for i = 1, #A, 3 do
  local v = redis.call('HMGET', key('r', A[i]), 'sandbox', 'token')
  out[#out + 1] = (v[1] == A[i + 1] or (v[2] == A[i + 2] and A[i + 2] ~= '')) and 1 or 0
end
return out
