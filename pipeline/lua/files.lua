-- Read only: which of these keys name a file. A: (kind p or t, id or group, token or '')... -> {number among them, reference}...
local out = {}
for i = 1, #A, 3 do
  local name = A[i] == 'p' and key('p', A[i + 1], A[i + 2]) or key('t', A[i + 1])
  local reference = held_in_file(name)
  if reference then
    out[#out + 1] = (i - 1) / 3
    out[#out + 1] = reference
  end
end
return out
