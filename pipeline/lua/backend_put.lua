-- Register a policy server, or say anew what it is. A: id, owner or '' (by hand), life ms or '' (no lease: it stays until it
-- is dropped), then (field, value)...
-- -> {'OK', ''} | {'TAKEN', owner} while another owner's registration holds | {'TWICE', id} when it is there under another id
unlock()
local h, all = key('backend', A[1]), key('backends')
local ends = tonumber(redis.call('ZSCORE', all, A[1]))
local held = ends and ends > now
local owner = redis.call('HGET', h, 'owner') or ''
if held and owner ~= A[2] then return { 'TAKEN', owner } end
local url -- one server under two ids would be given weights by two at once
for i = 4, #A, 2 do if A[i] == 'url' then url = A[i + 1] end end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', all, '(' .. whole(now), '+inf')) do
  if id ~= A[1] and redis.call('HGET', key('backend', id), 'url') == url then return { 'TWICE', id } end
end
if not held then redis.call('DEL', h) end
redis.call('HSET', h, 'owner', A[2], unpack(A, 4))
if redis.call('EXISTS', key('raise', A[1])) == 1 then redis.call('HSET', h, 'version', '') end -- its weights are moving
redis.call('ZADD', all, A[3] == '' and '+inf' or whole(now + A[3]), A[1])
return { 'OK', '' }
