-- Lease whole groups that are complete, oldest first. A: lane, how many, lease ms, consumer, nonce, newest schema that it reads
-- -> per member {group, id, token}. A group some of whose members are in another consumer's hands is left for later. Of one
-- that closed and let the rest go on, those that have ended come, and the rest another time.
local memo = key('claim', A[4] .. ':groups')
local out = {}
if redis.call('HGET', memo, 'nonce') == A[5] then
  for group, id, token in string.gmatch(redis.call('HGET', memo, 'got'), '([^\n\t]+)\t([^\n\t]+)\t([^\n\t]+)\n') do
    if redis.call('HGET', key('r', id), 'token') == token then out[#out + 1] = { group, id, token } end
  end
  return out
end
if overtaken(memo, A[5]) then return out end
local refusal = above(A[6])
if refusal then return refusal end
unlock()
local groups, ready = key('groups', A[1]), key('ready', 'done', A[1])
local need, got, count = tonumber(A[2]), {}, 0
for _, group in ipairs(redis.call('ZRANGE', groups, 0, need * 2 + 16)) do
  if need <= 0 then break end
  local members, whole_group = {}, true
  local g = redis.call('HMGET', key('g', group), 'closed', 'rest', 'part')
  for _, id in ipairs(redis.call('SMEMBERS', key('m', group))) do
    if redis.call('ZSCORE', ready, id) then
      members[#members + 1] = id
    elseif not (g[1] and g[2] == 'later') or redis.call('HGET', key('r', id), 'stage') == 'done' then
      whole_group = false
    end
  end
  redis.call('ZREM', groups, group)
  if whole_group and #members > 0 then
    table.sort(members)
    for _, id in ipairs(members) do
      local token = A[5] .. '-' .. count
      count = count + 1
      redis.call('ZREM', ready, id)
      redis.call('HSET', key('r', id), 'state', 'leased', 'token', token, 'owner', A[4], 'since', whole(now))
      if g[3] then redis.call('HSET', key('r', id), 'late', 1) end
      redis.call('ZADD', key('lease', 'done'), whole(now + A[3]), id)
      redis.call('SADD', key('own', A[4]), id)
      out[#out + 1] = { group, id, token }
      got[#got + 1] = group .. '\t' .. id .. '\t' .. token .. '\n'
    end
    need = need - 1
  end
end
redis.call('HSET', memo, 'nonce', A[5], 'got', table.concat(got), 'reads', A[6])
redis.call('PEXPIRE', memo, 3600000)
return out
